/* The HTTP side of the server: what its files share. */
#ifndef X3_SERVER_INTERNAL_H
#define X3_SERVER_INTERNAL_H

#include <microhttpd.h>
#include <pthread.h>
#include <semaphore.h>

#include "runtime/serve/server_json.h"

/* A connection, for the watch over slow ones. */
typedef struct x3_socket {
    struct x3_socket *before, *after;
    int fd;
    enum x3_socket_state {
        X3_SOCKET_WAITING,  /* between requests: for idle_seconds */
        X3_SOCKET_READING,  /* until a request is whole: for request_seconds */
        X3_SOCKET_ANSWERING, /* as long as it takes */
        X3_SOCKET_CUT        /* shut by the watch, once */
    } state;
    double since;
} x3_socket;

#define X3_STATUS_CLASSES 6 /* 1xx to 5xx, at [1] to [5] */

struct x3_server {
    x3_server_options o;
    x3_sampling defaults;
    struct MHD_Daemon *daemon;
    double started;
    int64_t created;
    bool local;    /* for this machine only, and without keys */
    sem_t readers; /* requests being parsed and put into tokens: each takes many times its bytes */
    pthread_mutex_t mutex; /* guards what follows */
    x3_socket *sockets;
    uint64_t responses[X3_STATUS_CLASSES], n_disconnects, n_timeouts;
    bool closing;
    pthread_cond_t changed;
    pthread_t watch;
};

/* One HTTP request. */
typedef struct x3_http {
    x3_server *s;
    struct MHD_Connection *c;
    x3_socket *socket;
    x3_text body;
    bool answered; /* before the body was whole */
} x3_http;

typedef enum MHD_Result (*x3_http_handler)(x3_http *q);

/* Answers. They return what libmicrohttpd's handler returns. */
enum MHD_Result x3_http_json(x3_http *q, unsigned status, cJSON *json); /* takes over json; NULL: out of memory */
enum MHD_Result x3_http_error(x3_http *q, const x3_api_error *e);
enum MHD_Result x3_http_text(x3_http *q, unsigned status, const char *type, const char *text, size_t n_bytes);
/* Queues a response that has been made, and counts it. */
enum MHD_Result x3_http_queue(x3_http *q, unsigned status, struct MHD_Response *response);
/* True when the client has gone. */
bool x3_http_is_gone(const x3_http *q);

/* server_routes.c */
enum MHD_Result x3_route(x3_http *q, const char *method, const char *path);
/* True for paths whose requests have bodies. */
bool x3_route_takes_body(const char *path);
/* True for paths that need no API key. */
bool x3_route_is_open(const char *path);

/* server_chat.c */
enum MHD_Result x3_handle_chat(x3_http *q);
enum MHD_Result x3_handle_completion(x3_http *q);

/* server_page.c: the status page */
extern const char x3_status_page[];
extern const unsigned x3_status_page_bytes;

#endif
