/* Connections: listening, bodies, API keys, limits of time and size. */
#include "runtime/serve/server.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "formats/io.h"
#include "runtime/serve/server_internal.h"

#define STACK_BYTES ((size_t)8 << 20) /* templates recurse */
#define READERS 4                     /* requests read at once */
#define CLOSE_SECONDS 5               /* for last bytes to go out */

/* ---- API keys ---- */

/* Takes the same time wherever the texts differ. */
static bool is_equal(const char *given, size_t n_given, const char *key)
{
    size_t n = strlen(key);
    unsigned different = n != n_given;

    for (size_t i = 0; i < n; i++)
        different |= (unsigned char)key[i] ^ (unsigned char)(n_given == 0 ? 0 : given[i % n_given]);
    return different == 0;
}

static bool has_key(const x3_http *q)
{
    const char *header = MHD_lookup_connection_value(q->c, MHD_HEADER_KIND, "Authorization");
    bool found = q->s->o.n_keys == 0;

    if (found || header == NULL || strncasecmp(header, "Bearer ", 7) != 0)
        return found;
    for (size_t i = 0; i < q->s->o.n_keys; i++)
        found |= is_equal(header + 7, strlen(header + 7), q->s->o.keys[i]);
    return found;
}

x3_status x3_server_keys_read(char ***keys, size_t *n, const char *path, x3_err *err)
{
    char *text = NULL, *save = NULL;
    size_t n_bytes, capacity = 0;
    x3_status rc;

    *keys = NULL;
    *n = 0;
    X3_TRY(rc, out, x3_read_file(&text, &n_bytes, path, 1 << 20, err));
    for (char *line = strtok_r(text, "\r\n", &save); line != NULL; line = strtok_r(NULL, "\r\n", &save)) {
        if (line[0] == '#' || strspn(line, " \t") == strlen(line))
            continue;
        if (strpbrk(line, " \t") != NULL) {
            rc = x3_fail(err, X3_ERR_INPUT, "%s: key %zu has white space in it", path, *n + 1);
            goto out;
        }
        X3_TRY(rc, out, x3_grow(keys, &capacity, *n + 1, sizeof **keys, err));
        X3_TRY(rc, out, x3_strdup(&(*keys)[*n], line, err));
        ++*n;
    }
    if (*n == 0)
        rc = x3_fail(err, X3_ERR_INPUT, "%s: no API key in it", path);
out:
    free(text);
    if (rc != X3_OK) {
        x3_server_keys_free(*keys, *n);
        *keys = NULL;
        *n = 0;
    }
    return rc;
}

void x3_server_keys_free(char **keys, size_t n)
{
    for (size_t i = 0; i < n; i++)
        free(keys[i]);
    free(keys);
}

/* ---- answers ---- */

enum MHD_Result x3_http_queue(x3_http *q, unsigned status, struct MHD_Response *response)
{
    if (response == NULL)
        return MHD_NO;
    pthread_mutex_lock(&q->s->mutex);
    q->s->responses[status / 100 < X3_STATUS_CLASSES ? status / 100 : 5]++;
    pthread_mutex_unlock(&q->s->mutex);
    enum MHD_Result result = MHD_queue_response(q->c, status, response);
    MHD_destroy_response(response);
    return result;
}

enum MHD_Result x3_http_text(x3_http *q, unsigned status, const char *type, const char *text, size_t n_bytes)
{
    struct MHD_Response *response = MHD_create_response_from_buffer(n_bytes, (void *)(uintptr_t)text, MHD_RESPMEM_MUST_COPY);

    if (response != NULL) {
        MHD_add_response_header(response, "Content-Type", type);
        MHD_add_response_header(response, "X-Content-Type-Options", "nosniff");
        if (status == MHD_HTTP_UNAUTHORIZED)
            MHD_add_response_header(response, "WWW-Authenticate", "Bearer");
        if (status == MHD_HTTP_SERVICE_UNAVAILABLE)
            MHD_add_response_header(response, "Retry-After", "1");
    }
    return x3_http_queue(q, status, response);
}

enum MHD_Result x3_http_json(x3_http *q, unsigned status, cJSON *json)
{
    static const char failed[] = "{\"error\":{\"message\":\"out of memory\",\"type\":\"server_error\",\"param\":null,\"code\":null}}";
    char *text = json == NULL ? NULL : cJSON_PrintUnformatted(json);
    enum MHD_Result result;

    cJSON_Delete(json);
    if (text == NULL)
        return x3_http_text(q, 500, "application/json", failed, sizeof failed - 1);
    result = x3_http_text(q, status, "application/json", text, strlen(text));
    cJSON_free(text);
    return result;
}

enum MHD_Result x3_http_error(x3_http *q, const x3_api_error *e)
{
    cJSON *json = NULL;
    x3_err err = {0};

    if (x3_api_error_json(e, &json, &err) != X3_OK)
        json = NULL;
    return x3_http_json(q, (unsigned)e->status, json);
}

bool x3_http_is_gone(const x3_http *q)
{
    char byte;
    ssize_t n = q->socket == NULL ? 1 : recv(q->socket->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);

    return n == 0 || (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
}

/* ---- the watch over slow connections ---- */

static void set_state(x3_server *s, x3_socket *socket, enum x3_socket_state state)
{
    if (socket == NULL)
        return;
    pthread_mutex_lock(&s->mutex);
    socket->state = state;
    socket->since = x3_seconds();
    pthread_mutex_unlock(&s->mutex);
}

/* libmicrohttpd's own limit is on silence: a byte now and then would keep a connection for ever. */
static void *run_watch(void *arg)
{
    x3_server *s = arg;
    struct timespec until;

    pthread_mutex_lock(&s->mutex);
    while (!s->closing) {
        double now = x3_seconds();
        for (x3_socket *k = s->sockets; k != NULL; k = k->after)
            if (k->state != X3_SOCKET_ANSWERING && k->state != X3_SOCKET_CUT &&
                now - k->since > (k->state == X3_SOCKET_READING ? s->o.request_seconds : s->o.idle_seconds)) {
                shutdown(k->fd, SHUT_RDWR);
                s->n_timeouts += k->state == X3_SOCKET_READING;
                k->state = X3_SOCKET_CUT;
            }
        clock_gettime(CLOCK_MONOTONIC, &until);
        until.tv_nsec += 250000000;
        until.tv_sec += until.tv_nsec / 1000000000;
        until.tv_nsec %= 1000000000;
        pthread_cond_timedwait(&s->changed, &s->mutex, &until);
    }
    pthread_mutex_unlock(&s->mutex);
    return NULL;
}

static void on_connection(void *arg, struct MHD_Connection *c, void **context, enum MHD_ConnectionNotificationCode what)
{
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(c, MHD_CONNECTION_INFO_CONNECTION_FD);
    x3_server *s = arg;
    x3_socket *k = *context;

    if (what == MHD_CONNECTION_NOTIFY_STARTED) {
        if (info == NULL || x3_alloc(&k, 1, sizeof *k, NULL) != X3_OK)
            return; /* works without the watch */
        k->fd = info->connect_fd;
        k->state = X3_SOCKET_READING;
        k->since = x3_seconds();
        pthread_mutex_lock(&s->mutex);
        k->after = s->sockets;
        if (k->after != NULL)
            k->after->before = k;
        s->sockets = k;
        pthread_mutex_unlock(&s->mutex);
        *context = k;
    } else if (k != NULL) {
        pthread_mutex_lock(&s->mutex);
        *(k->before == NULL ? &s->sockets : &k->before->after) = k->after;
        if (k->after != NULL)
            k->after->before = k->before;
        pthread_mutex_unlock(&s->mutex);
        free(k);
        *context = NULL;
    }
}

static x3_socket *socket_of(struct MHD_Connection *c)
{
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(c, MHD_CONNECTION_INFO_SOCKET_CONTEXT);

    return info == NULL ? NULL : info->socket_context;
}

/* ---- requests ---- */

/* The request line is here: the first of several requests of a connection began when the connection did. */
static void *on_request_line(void *arg, const char *uri, struct MHD_Connection *c)
{
    x3_socket *k = socket_of(c);
    x3_server *s = arg;

    (void)uri;
    if (k != NULL && k->state != X3_SOCKET_READING)
        set_state(s, k, X3_SOCKET_READING);
    return NULL;
}

static void on_completed(void *arg, struct MHD_Connection *c, void **context, enum MHD_RequestTerminationCode why)
{
    x3_http *q = *context;
    x3_server *s = arg;

    (void)c;
    pthread_mutex_lock(&s->mutex);
    s->n_disconnects += why != MHD_REQUEST_TERMINATED_COMPLETED_OK && why != MHD_REQUEST_TERMINATED_DAEMON_SHUTDOWN;
    pthread_mutex_unlock(&s->mutex);
    if (q == NULL)
        return;
    set_state(s, q->socket, X3_SOCKET_WAITING);
    x3_text_free(&q->body);
    free(q);
    *context = NULL;
}

static enum MHD_Result refuse(x3_http *q, int status, const char *type, const char *code, const char *message)
{
    x3_api_error e = {0};

    q->answered = true;
    if (x3_api_fail(&e, status, type, code, NULL, "%s", message) == X3_OK)
        return MHD_NO;
    return x3_http_error(q, &e);
}

/* "localhost", 127.x.x.x or "[::1]", with or without a port. */
static bool is_local_host(const char *host)
{
    size_t n = host[0] == '[' ? strcspn(host, "]") + 1 : strcspn(host, ":");
    struct in_addr v4;
    char name[32];

    if (n >= sizeof name || n > strlen(host))
        return false;
    if (host[n] != '\0' && (host[n] != ':' || strspn(host + n + 1, "0123456789") != strlen(host + n + 1)))
        return false;
    memcpy(name, host, n);
    name[n] = '\0';
    return strcasecmp(name, "localhost") == 0 || strcmp(name, "[::1]") == 0 ||
           (inet_pton(AF_INET, name, &v4) == 1 && ntohl(v4.s_addr) >> 24 == 127);
}

/* Headers are here. Whoever has no key, or sends too much, is told before the body is read. */
static enum MHD_Result on_headers(x3_http *q, const char *path, const char *method)
{
    const char *length = MHD_lookup_connection_value(q->c, MHD_HEADER_KIND, "Content-Length");
    const char *host = MHD_lookup_connection_value(q->c, MHD_HEADER_KIND, "Host");
    bool has_body = MHD_lookup_connection_value(q->c, MHD_HEADER_KIND, "Transfer-Encoding") != NULL ||
                    (length != NULL && strtoull(length, NULL, 10) > 0);

    /* a page of another site whose name has been pointed here ("DNS rebinding") sends that name */
    if (q->s->local && host != NULL && !is_local_host(host))
        return refuse(q, 403, "invalid_request_error", "wrong_host",
                      "without API keys only requests to localhost, 127.x or [::1] are answered: the Host header has another name");
    if (!x3_route_is_open(path) && !has_key(q))
        return refuse(q, 401, "authentication_error", "invalid_api_key", "no API key, or a wrong one: send \"Authorization: Bearer KEY\"");
    if (length != NULL && strtoull(length, NULL, 10) > q->s->o.max_body)
        return refuse(q, 413, "invalid_request_error", "request_too_large", "the request is too large");
    if (has_body && !x3_route_takes_body(path)) {
        q->answered = true;
        return x3_route(q, method, path);
    }
    return MHD_YES;
}

static enum MHD_Result on_request(void *arg, struct MHD_Connection *c, const char *path, const char *method, const char *version,
                                  const char *data, size_t *n_data, void **context)
{
    x3_server *s = arg;
    x3_http *q = *context;
    x3_err err = {0};

    (void)version;
    if (q == NULL) {
        if (x3_alloc(&q, 1, sizeof *q, &err) != X3_OK)
            return MHD_NO;
        q->s = s;
        q->c = c;
        q->socket = socket_of(c);
        *context = q;
        return on_headers(q, path, method);
    }
    if (*n_data > 0) {
        if (q->answered) {
            *n_data = 0;
            return MHD_YES;
        }
        if (*n_data > s->o.max_body - q->body.n_items) /* sent in pieces, without a length */
            return MHD_NO;
        if (x3_text_put(&q->body, data, *n_data, &err) != X3_OK)
            return MHD_NO;
        *n_data = 0;
        return MHD_YES;
    }
    if (q->answered)
        return MHD_YES;
    set_state(s, q->socket, X3_SOCKET_ANSWERING);
    return x3_route(q, method, path);
}

/* ---- opening and closing ---- */

static x3_status fill_address(const x3_server_options *o, struct sockaddr_storage *address, x3_err *err)
{
    struct sockaddr_in v4 = {.sin_family = AF_INET, .sin_port = htons(o->port)};
    struct sockaddr_in6 v6 = {.sin6_family = AF_INET6, .sin6_port = htons(o->port)};

    memset(address, 0, sizeof *address);
    if (inet_pton(AF_INET, strcmp(o->host, "localhost") == 0 ? "127.0.0.1" : o->host, &v4.sin_addr) == 1)
        memcpy(address, &v4, sizeof v4);
    else if (inet_pton(AF_INET6, o->host, &v6.sin6_addr) == 1)
        memcpy(address, &v6, sizeof v6);
    else
        return x3_fail(err, X3_ERR_INPUT, "\"%s\" is not an address: write 127.0.0.1, 0.0.0.0 or ::1, say", o->host);
    return X3_OK;
}

static bool is_loopback(const struct sockaddr_storage *address)
{
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;

    memcpy(&v4, address, sizeof v4);
    memcpy(&v6, address, sizeof v6);
    return address->ss_family == AF_INET ? ntohl(v4.sin_addr.s_addr) >> 24 == 127 : IN6_IS_ADDR_LOOPBACK(&v6.sin6_addr);
}

static x3_status start_daemon(x3_server *s, x3_err *err)
{
    struct sockaddr_storage address;
    x3_status rc = fill_address(&s->o, &address, err);
    unsigned flags = MHD_USE_INTERNAL_POLLING_THREAD | MHD_USE_THREAD_PER_CONNECTION | MHD_USE_POLL | MHD_USE_ITC; /* quiesce asks for it */

    if (rc != X3_OK)
        return rc;
    if (address.ss_family == AF_INET6)
        flags |= MHD_USE_IPv6;
    s->local = s->o.n_keys == 0 && is_loopback(&address);
    s->daemon = MHD_start_daemon(flags, s->o.port, NULL, NULL, on_request, s, MHD_OPTION_SOCK_ADDR, (struct sockaddr *)&address,
                                 MHD_OPTION_CONNECTION_LIMIT, s->o.max_connections, MHD_OPTION_CONNECTION_TIMEOUT,
                                 s->o.idle_seconds, MHD_OPTION_THREAD_STACK_SIZE, STACK_BYTES, MHD_OPTION_LISTENING_ADDRESS_REUSE, 1u,
                                 MHD_OPTION_NOTIFY_CONNECTION, on_connection, s, MHD_OPTION_NOTIFY_COMPLETED, on_completed, s,
                                 MHD_OPTION_URI_LOG_CALLBACK, on_request_line, s, MHD_OPTION_END);
    if (s->daemon == NULL)
        return x3_fail(err, X3_ERR_IO, "cannot listen on %s port %u: %s", s->o.host, (unsigned)s->o.port, strerror(errno));
    return X3_OK;
}

x3_status x3_server_open(x3_server **out, const x3_server_options *o, x3_err *err)
{
    pthread_condattr_t attributes;
    x3_server *s = NULL;
    x3_status rc;

    *out = NULL;
    X3_TRY(rc, out, x3_alloc(&s, 1, sizeof *s, err));
    s->o = *o;
    s->o.max_body = o->max_body == 0 ? (size_t)8 << 20 : o->max_body;
    s->o.max_connections = o->max_connections == 0 ? 256 : o->max_connections;
    s->o.request_seconds = o->request_seconds == 0 ? 30 : o->request_seconds;
    s->o.idle_seconds = o->idle_seconds == 0 ? 60 : o->idle_seconds;
    s->started = x3_seconds();
    s->created = time(NULL);
    X3_TRY(rc, out, x3_sampling_defaults(&s->defaults, o->checkpoint->config, err));
    pthread_mutex_init(&s->mutex, NULL);
    sem_init(&s->readers, 0, READERS);
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&s->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    if (pthread_create(&s->watch, NULL, run_watch, s) != 0) {
        rc = x3_fail(err, X3_ERR_MEMORY, "the server's thread cannot be started");
        goto out;
    }
    rc = start_daemon(s, err);
    if (rc == X3_OK)
        *out = s;
    else
        x3_server_close(s);
    s = NULL;
out:
    free(s);
    return rc;
}

uint16_t x3_server_port(const x3_server *s)
{
    const union MHD_DaemonInfo *info = MHD_get_daemon_info(s->daemon, MHD_DAEMON_INFO_BIND_PORT);

    return info == NULL ? 0 : info->port;
}

void x3_server_quiesce(x3_server *s)
{
    MHD_socket fd = MHD_quiesce_daemon(s->daemon);

    if (fd != MHD_INVALID_SOCKET)
        close(fd);
}

/* What has been answered still has to be sent: libmicrohttpd stops in the middle. */
static void wait_for_answers(x3_server *s)
{
    const struct timespec pause = {.tv_nsec = 10000000};
    const double until = x3_seconds() + CLOSE_SECONDS;
    bool answering = true;

    while (answering && x3_seconds() < until) {
        answering = false;
        pthread_mutex_lock(&s->mutex);
        for (const x3_socket *k = s->sockets; k != NULL; k = k->after)
            answering |= k->state == X3_SOCKET_ANSWERING;
        pthread_mutex_unlock(&s->mutex);
        if (answering)
            nanosleep(&pause, NULL);
    }
}

void x3_server_close(x3_server *s)
{
    if (s == NULL)
        return;
    if (s->daemon != NULL) {
        wait_for_answers(s);
        MHD_stop_daemon(s->daemon);
    }
    pthread_mutex_lock(&s->mutex);
    s->closing = true;
    pthread_cond_signal(&s->changed);
    pthread_mutex_unlock(&s->mutex);
    pthread_join(s->watch, NULL);
    pthread_cond_destroy(&s->changed);
    pthread_mutex_destroy(&s->mutex);
    sem_destroy(&s->readers);
    free(s);
}
