/* The CUDA kernels against their C forms, float64 products and their own promises.
 *
 *     test_kernels [--tiles N] [--quick] [--k K] [WORD...]      tests whose name contains one of the words
 *
 * N tiles a codebook and K are searched on the CPU too (default 64; 4096 takes 16 cores about a minute); --k: one K alone. Last line:
 * `N passed, N failed, N skipped`; all are skipped without a GPU. Exit 1 when a test failed or none ran. */
#include <cublas_v2.h>

#include "tests/cuda/cuda_test.cuh"

static x3_cuda_info info;
static size_t n_search_tiles = 64;
static bool quick; /* every K with one codebook, one shape, some counts of rows: for tools that slow a kernel a hundred times */

static int only_k; /* 0: all */

static bool is_left_out(int K, int codebook)
{
    return (quick && codebook != (K + 1) % 3) || (only_k != 0 && K != only_k);
}

static x3_pool *pool;

#define CHECK(condition, ...)                                              \
    do {                                                                   \
        if (!(condition)) {                                                \
            printf("    %s:%d: ", __FILE__, __LINE__);                     \
            printf(__VA_ARGS__);                                           \
            printf("\n");                                                  \
            return false;                                                  \
        }                                                                  \
    } while (0)

/* ---- decoding ------------------------------------------------------------------------------------------------------ */

static bool check_decode(int K, x3_codebook codebook)
{
    const size_t n_in = 1024, n_out = 2048, n = n_in * n_out, n_tiles = n / 256;
    x3_cuda_group g = group_create(K, codebook, n_in, n_out, false, (uint32_t)(100 * K));
    float *values = (float *)malloc(X3_STATES * 4), *d_f32 = (float *)device_alloc(n * 4);
    __half *d_f16 = (__half *)device_alloc(n * 2);
    uint8_t *seen = (uint8_t *)calloc(X3_STATES, 1);
    size_t n_seen = 0;
    bool good = true;

    x3_codebook_values(codebook, values);
    MUST(cudaMemset(d_f32, 0xFF, n * 4));
    MUST(cudaMemset(d_f16, 0xFF, n * 2));
    MUST_X3(x3_cuda_reconstruct(&info, &g, d_f32, X3_CUDA_F32, NULL, err));
    MUST_X3(x3_cuda_reconstruct(&info, &g, d_f16, X3_CUDA_F16, NULL, err));
    uint32_t *words = (uint32_t *)to_host(g.d_words, n_tiles * 32 * (size_t)K);
    float *f32 = (float *)to_host(d_f32, n * 4);
    __half *f16 = (__half *)to_host(d_f16, n * 2);
    for (size_t tile = 0; tile < n_tiles; tile++) {
        uint16_t states[256];
        x3_tile_unpack(words + tile * 8 * (size_t)K, K, states);
        for (int p = 0; p < 256; p++) {
            const size_t at = (tile / (n_out / 16) * 16 + (size_t)x3_tile_row(p)) * n_out + tile % (n_out / 16) * 16 +
                              (size_t)x3_tile_column(p);
            const float value = values[states[p]], from_half = __half2float(f16[at]);
            n_seen += seen[states[p]] == 0;
            seen[states[p]] = 1;
            good = good && memcmp(&value, &f32[at], 4) == 0 && memcmp(&value, &from_half, 4) == 0;
        }
    }
    group_free(&g);
    cudaFree(d_f32);
    cudaFree(d_f16);
    free(values);
    free(words);
    free(f32);
    free(f16);
    free(seen);
    CHECK(n_seen == X3_STATES, "K=%d %s: only %zu states in the sample", K, codebook_name[codebook], n_seen);
    CHECK(good, "K=%d %s: other values than the CPU", K, codebook_name[codebook]);
    return true;
}

static bool reconstruction_equals_the_cpu_for_all_states_k_and_codebooks(void)
{
    bool good = true;

    for (int K = 1; K <= 8; K++)
        for (int cb = 0; cb < 3; cb++)
            good = check_decode(K, (x3_codebook)cb) && good;
    return good;
}

/* ---- linear -------------------------------------------------------------------------------------------------------- */

/* A group with rows and everything a call needs. */
typedef struct linear_case {
    x3_cuda_group g;
    size_t n_rows;
    float *d_x, *d_y, *d_wq;
    void *d_scratch;
    double *exact; /* [n_rows][n_out] */
} linear_case;

static linear_case case_create(int K, x3_codebook codebook, size_t n_in, size_t n_out, size_t n_rows, bool with_exact)
{
    linear_case c = {};

    c.g = group_create(K, codebook, n_in, n_out, true, (uint32_t)(7 * K + codebook));
    c.n_rows = n_rows;
    c.d_x = (float *)device_alloc(n_rows * n_in * 4);
    c.d_y = (float *)device_alloc(n_rows * n_out * 4);
    c.d_scratch = device_alloc(x3_cuda_linear_bytes(&info, &c.g, 1, 128));
    fill_normal<<<128, 256>>>(c.d_x, n_rows * n_in, (uint32_t)(K + 1000), 1.0f);
    if (with_exact) {
        c.d_wq = (float *)device_alloc(c.g.n_in_padded * c.g.n_out_padded * 4);
        MUST_X3(x3_cuda_reconstruct(&info, &c.g, c.d_wq, X3_CUDA_F32, NULL, err));
        float *x = (float *)to_host(c.d_x, n_rows * n_in * 4);
        c.exact = linear_f64(&c.g, c.d_wq, x, n_rows);
        free(x);
    }
    return c;
}

static void case_free(linear_case *c)
{
    group_free(&c->g);
    cudaFree(c->d_x);
    cudaFree(c->d_y);
    cudaFree(c->d_wq);
    cudaFree(c->d_scratch);
    free(c->exact);
}

static x3_cuda_rows case_rows(const linear_case *c, size_t first, size_t n_rows)
{
    x3_cuda_rows r = {n_rows, c->d_x + first * c->g.n_in, X3_CUDA_F32, c->g.n_in, c->d_y + first * c->g.n_out, X3_CUDA_F32,
                      c->g.n_out, NULL};
    return r;
}

static double case_error(const linear_case *c, size_t n_rows)
{
    float *y = (float *)to_host(c->d_y, n_rows * c->g.n_out * 4);
    double e = relative_error(y, c->exact, n_rows * c->g.n_out);

    free(y);
    return e;
}

static const size_t shapes[][2] = {{512, 384}, {1500, 880}, {4096, 1024}};

static bool linear_is_near_the_float64_product(void)
{
    double worst = 0;

    for (int K = 1; K <= 8; K++)
        for (int cb = 0; cb < 3; cb++)
            for (int s = 0; s < (quick ? 1 : 3) && !is_left_out(K, cb); s++) {
                linear_case c = case_create(K, (x3_codebook)cb, shapes[s][0], shapes[s][1], 128, true);
                static const size_t counts[] = {1, 3, 4, 5, 16, 17, 33, 64, 65, 128};
                for (size_t n : counts) {
                    const x3_cuda_rows rows = case_rows(&c, 0, n);
                    MUST(cudaMemset(c.d_y, 0xFF, c.n_rows * c.g.n_out * 4));
                    MUST_X3(x3_cuda_linear(&info, &c.g, &rows, false, c.d_scratch, NULL, err));
                    const double e = case_error(&c, n);
                    worst = e > worst ? e : worst;
                    CHECK(e < 4e-4, "K=%d %s %zux%zu, %zu rows: relative error %.3g", K, codebook_name[cb], shapes[s][0],
                          shapes[s][1], n, e);
                }
                int *counters = (int *)to_host(c.d_scratch, X3_CUDA_COUNTER_BYTES);
                for (size_t i = 0; i < X3_CUDA_COUNTER_BYTES / 4; i++)
                    CHECK(counters[i] == 0, "counter %zu is left at %d", i, counters[i]);
                free(counters);
                case_free(&c);
            }
    printf("    largest relative error %.3g\n", worst);
    return true;
}

static __global__ void count_differences(const uint32_t *a, const uint32_t *b, size_t n, unsigned long long *out)
{
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
        if (a[i] != b[i])
            atomicAdd(out, 1ull);
}

static bool check_rows(int K, x3_codebook codebook, size_t n_in, size_t n_out)
{
    linear_case c = case_create(K, codebook, n_in, n_out, 128, false);
    float *d_all = (float *)device_alloc(128 * n_out * 4);
    unsigned long long *d_count = (unsigned long long *)device_alloc(8);
    x3_cuda_rows rows = case_rows(&c, 0, 128);

    rows.d_y = d_all;
    MUST_X3(x3_cuda_linear(&info, &c.g, &rows, false, c.d_scratch, NULL, err));
    for (size_t n = 1; n <= 128; n += quick && n > 4 ? n : 1) {
        rows = case_rows(&c, 0, n);
        MUST(cudaMemsetAsync(c.d_y, 0xFF, n * n_out * 4));
        MUST_X3(x3_cuda_linear(&info, &c.g, &rows, n % 2 == 0, c.d_scratch, NULL, err));
        count_differences<<<64, 256>>>((uint32_t *)d_all, (uint32_t *)c.d_y, n * n_out, d_count);
    }
    for (size_t first = 1; first < 128; first += 9) { /* other neighbours, other places in the operand */
        rows = case_rows(&c, first, x3_min_size(first % 5 + 1, 128 - first));
        MUST_X3(x3_cuda_linear(&info, &c.g, &rows, false, c.d_scratch, NULL, err));
        count_differences<<<64, 256>>>((uint32_t *)d_all + first * n_out, (uint32_t *)rows.d_y, rows.n_rows * n_out, d_count);
    }
    unsigned long long *count = (unsigned long long *)to_host(d_count, 8), n_different = *count;
    free(count);
    cudaFree(d_all);
    cudaFree(d_count);
    case_free(&c);
    CHECK(n_different == 0, "K=%d %s %zux%zu: %llu results depend on the other rows", K, codebook_name[codebook], n_in, n_out,
          n_different);
    return true;
}

static bool linear_rows_do_not_depend_on_other_rows_1_to_128(void)
{
    bool good = true;

    for (int s = 0; s < (quick ? 1 : 3); s++)
        for (int K = 1; K <= 8; K++)
            for (int cb = 0; cb < 3; cb++)
                good = (is_left_out(K, cb) || check_rows(K, (x3_codebook)cb, shapes[s][0], shapes[s][1])) && good;
    return good;
}

/* Three weights in one launch: near the float64 products, whatever the number of rows the same bits, and x3_cuda_linear_rows' too. */
static bool linears_of_one_input_are_one_product(void)
{
    static const size_t n_outs[] = {384, 100, 256};
    bool good = true;

    for (int K = 1; K <= 8; K++)
        for (int cb = 0; cb < 3; cb++) {
            if (is_left_out(K, cb))
                continue;
            linear_case c[3];
            x3_cuda_group g[3];
            x3_cuda_rows rows[3];
            for (int i = 0; i < 3; i++) {
                c[i] = case_create(K, (x3_codebook)cb, 1500, n_outs[i], 150, true);
                g[i] = c[i].g;
            }
            void *d_scratch = device_alloc(x3_cuda_linear_bytes(&info, g, 3, 128));
            void *d_many = device_alloc(x3_cuda_linear_rows_bytes(g, 3, 150));
            float *all[3];
            for (int i = 0; i < 3; i++) {
                rows[i] = case_rows(&c[i], 0, 150);
                rows[i].d_x = c[0].d_x; /* case_create gives all the same rows */
            }
            MUST_X3(x3_cuda_linear_rows(&info, g, rows, 3, d_many, NULL, err));
            for (int i = 0; i < 3; i++) {
                const double e = case_error(&c[i], 150);
                good = good && e < 4e-4;
                if (e >= 4e-4)
                    printf("    K=%d %s, %zu outputs: relative error %.3g\n", K, codebook_name[cb], n_outs[i], e);
                all[i] = (float *)to_host(c[i].d_y, 150 * n_outs[i] * 4);
            }
            static const size_t counts[] = {1, 2, 4, 7, 16, 31, 64, 128};
            for (size_t n : counts) {
                for (int i = 0; i < 3; i++) {
                    rows[i].n_rows = n;
                    MUST(cudaMemset(c[i].d_y, 0xFF, n * n_outs[i] * 4));
                }
                MUST_X3(x3_cuda_linears(&info, g, rows, 3, false, d_scratch, NULL, err));
                for (int i = 0; i < 3; i++) {
                    float *y = (float *)to_host(c[i].d_y, n * n_outs[i] * 4);
                    const bool same = memcmp(y, all[i], n * n_outs[i] * 4) == 0;
                    free(y);
                    if (!same)
                        printf("    K=%d %s, %zu outputs, %zu rows: other bits\n", K, codebook_name[cb], n_outs[i], n);
                    good = good && same;
                }
            }
            cudaFree(d_scratch);
            cudaFree(d_many);
            for (int i = 0; i < 3; i++) {
                free(all[i]);
                case_free(&c[i]);
            }
        }
    return good;
}

/* Other devices share less memory: fewer stages and no folded inputs, but the same sums. */
static bool linear_gives_the_same_bits_with_less_shared_memory(void)
{
    x3_cuda_info small = info;

    small.shared_bytes = 101376; /* compute capability 8.6, 8.9, 12.0 */
    for (int K = 1; K <= 8; K++) {
        linear_case c = case_create(K, X3_CB_MUL1, 4096, 1024, 128, false);
        static const size_t counts[] = {1, 4, 16, 32, 64, 128};
        for (size_t n : counts) {
            const x3_cuda_rows rows = case_rows(&c, 0, n);
            MUST_X3(x3_cuda_linear(&info, &c.g, &rows, false, c.d_scratch, NULL, err));
            float *a = (float *)to_host(c.d_y, n * 4096);
            MUST_X3(x3_cuda_linear(&small, &c.g, &rows, false, c.d_scratch, NULL, err));
            float *b = (float *)to_host(c.d_y, n * 4096);
            const bool same = memcmp(a, b, n * 4096) == 0;
            free(a);
            free(b);
            CHECK(same, "K=%d, %zu rows", K, n);
        }
        case_free(&c);
    }
    return true;
}

static bool linear_takes_and_gives_float16(void)
{
    linear_case c = case_create(3, X3_CB_MUL1, 1500, 880, 20, false);
    __half *d_x = (__half *)device_alloc(20 * 1500 * 2), *d_y = (__half *)device_alloc(20 * 880 * 2);

    halve<<<64, 256>>>(c.d_x, d_x, 20 * 1500);
    __half *x16 = (__half *)to_host(d_x, 20 * 1500 * 2);
    float *x = (float *)malloc(20 * 1500 * 4), y[880];
    for (int i = 0; i < 20 * 1500; i++)
        x[i] = __half2float(x16[i]);
    c.d_wq = (float *)device_alloc(c.g.n_in_padded * c.g.n_out_padded * 4);
    MUST_X3(x3_cuda_reconstruct(&info, &c.g, c.d_wq, X3_CUDA_F32, NULL, err));
    c.exact = linear_f64(&c.g, c.d_wq, x, 20);
    static const size_t counts[] = {1, 20};
    for (size_t n : counts) {
        const x3_cuda_rows rows = {n, d_x, X3_CUDA_F16, 1500, d_y, X3_CUDA_F16, 880, NULL};
        MUST_X3(x3_cuda_linear(&info, &c.g, &rows, false, c.d_scratch, NULL, err));
        __half *y16 = (__half *)to_host(d_y, n * 880 * 2);
        for (size_t r = 0; r < n; r++) {
            for (int i = 0; i < 880; i++)
                y[i] = __half2float(y16[r * 880 + (size_t)i]);
            const double e = relative_error(y, c.exact + r * 880, 880);
            CHECK(e < 6e-4, "%zu rows, row %zu: relative error %.3g", n, r, e);
        }
        free(y16);
    }
    cudaFree(d_x);
    cudaFree(d_y);
    free(x16);
    free(x);
    case_free(&c);
    return true;
}

static bool linear_can_be_captured_in_a_graph(void)
{
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    linear_case c = case_create(2, X3_CB_MUL1, 4096, 1024, 40, false);
    float *d_direct = (float *)device_alloc(40 * 4096), *d_again = (float *)device_alloc(40 * 4096);

    MUST(cudaDeviceSynchronize());
    MUST(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    static const size_t counts[] = {1, 16, 40};
    for (size_t n : counts) {
        x3_cuda_rows rows = case_rows(&c, 0, n), again = rows;
        rows.d_y = d_direct;
        again.d_y = d_again;
        MUST_X3(x3_cuda_linear(&info, &c.g, &rows, true, c.d_scratch, stream, err));
        MUST(cudaStreamSynchronize(stream));
        MUST(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        for (int i = 0; i < 5; i++) /* one after the other over the same scratch */
            MUST_X3(x3_cuda_linear(&info, &c.g, i % 2 == 0 ? &again : &rows, true, c.d_scratch, stream, err));
        MUST(cudaStreamEndCapture(stream, &graph));
        MUST(cudaGraphInstantiate(&exec, graph, 0));
        for (int replay = 0; replay < 3; replay++) {
            MUST(cudaMemsetAsync(d_again, 0xFF, n * 4096, stream));
            MUST(cudaGraphLaunch(exec, stream));
            MUST(cudaStreamSynchronize(stream));
            float *a = (float *)to_host(d_direct, n * 4096), *b = (float *)to_host(d_again, n * 4096);
            const bool same = memcmp(a, b, n * 4096) == 0;
            free(a);
            free(b);
            CHECK(same, "%zu rows, replay %d: other results than the direct call", n, replay);
        }
        MUST(cudaGraphExecDestroy(exec));
        MUST(cudaGraphDestroy(graph));
    }
    MUST(cudaStreamDestroy(stream));
    cudaFree(d_direct);
    cudaFree(d_again);
    case_free(&c);
    return true;
}

static bool linear_over_a_matrix_product_is_near_the_float64_product(void)
{
    cublasHandle_t blas;
    bool good = true;

    if (cublasCreate(&blas) != CUBLAS_STATUS_SUCCESS)
        return false;
    for (int s = 0; s < 3; s++) {
        linear_case c = case_create(3, X3_CB_MUL1, shapes[s][0], shapes[s][1], 300, true);
        void *d_scratch = device_alloc(x3_cuda_linear_gemm_bytes(&c.g, 300, X3_CUDA_F32));
        const x3_cuda_rows rows = case_rows(&c, 0, 300);
        MUST_X3(x3_cuda_linear_gemm(&info, blas, &c.g, &rows, d_scratch, NULL, err));
        const double e = case_error(&c, 300);
        printf("    %zux%zu, 300 rows: relative error %.3g\n", shapes[s][0], shapes[s][1], e);
        good = good && e < 4e-4;
        cudaFree(d_scratch);
        case_free(&c);
    }
    cublasDestroy(blas);
    CHECK(good, "too far from the float64 product");
    return true;
}

static bool linear_refuses_what_it_cannot_do(void)
{
    linear_case c = case_create(2, X3_CB_MUL1, 512, 384, 1, false);
    x3_err err = {};
    x3_cuda_rows rows = case_rows(&c, 0, 129);
    x3_cuda_group g = c.g;

    CHECK(x3_cuda_linear(&info, &g, &rows, false, c.d_scratch, NULL, &err) == X3_ERR_INPUT && strstr(err.text, "129") != NULL,
          "129 rows: %s", err.text);
    rows.n_rows = 1;
    g.K = 9;
    err = {};
    CHECK(x3_cuda_linear(&info, &g, &rows, false, c.d_scratch, NULL, &err) == X3_ERR_UNSUPPORTED, "K = 9: %s", err.text);
    g = c.g;
    g.n_in_padded = 500;
    err = {};
    CHECK(x3_cuda_linear(&info, &g, &rows, false, c.d_scratch, NULL, &err) == X3_ERR_INPUT, "500 inputs: %s", err.text);
    case_free(&c);
    return true;
}

/* ---- search -------------------------------------------------------------------------------------------------------- */

static float *random_tiles(int K, x3_codebook codebook, size_t n_tiles)
{
    float *x = (float *)malloc(n_tiles * 1024);
    x3_rng rng;

    x3_rng_init(&rng, (uint64_t)K, codebook_name[codebook]);
    for (size_t i = 0; i < n_tiles * 256; i++)
        x[i] = (float)(x3_rng_normal(&rng) * nominal_scale(codebook, K));
    return x;
}

static double search_error(const float *values, const float *x, const uint16_t *states, size_t n_tiles)
{
    double sum = 0;

    for (size_t i = 0; i < n_tiles * 256; i++)
        sum += ((double)values[states[i]] - x[i]) * ((double)values[states[i]] - x[i]);
    return sum;
}

static bool check_search(const x3_cuda_info *device, int K, x3_codebook codebook, size_t n_tiles)
{
    x3_trellis *t = NULL;
    float *x = random_tiles(K, codebook, n_tiles), *d_x = (float *)to_device(x, n_tiles * 1024);
    uint16_t *expected = (uint16_t *)malloc(n_tiles * 512), *d_states = (uint16_t *)device_alloc(n_tiles * 512);
    void *d_scratch = device_alloc(x3_cuda_search_bytes(device, K));

    MUST_X3(x3_trellis_create(&t, codebook, K, err));
    MUST(cudaMemset(d_states, 0xFF, n_tiles * 512));
    MUST_X3(x3_cuda_search(device, codebook, K, d_x, n_tiles, d_states, d_scratch, NULL, err));
    uint16_t *got = (uint16_t *)to_host(d_states, n_tiles * 512);
    MUST_X3(x3_cuda_search(device, codebook, K, d_x, n_tiles, d_states, d_scratch, NULL, err));
    uint16_t *again = (uint16_t *)to_host(d_states, n_tiles * 512);
    cpu_search_run(pool, t, x, n_tiles, expected);
    size_t n_broken = 0, n_different = 0;
    for (size_t i = 0; i < n_tiles * 256; i++) {
        const uint32_t before = got[i % 256 == 0 ? i + 255 : i - 1];
        n_broken += (uint32_t)(got[i] >> K) != (before & ((1u << (16 - K)) - 1));
        n_different += got[i] != expected[i];
    }
    const double e = search_error(t->values, x, got, n_tiles), cpu = search_error(t->values, x, expected, n_tiles);
    const bool same = memcmp(got, again, n_tiles * 512) == 0;
    x3_trellis_free(t);
    cudaFree(d_x);
    cudaFree(d_states);
    cudaFree(d_scratch);
    free(x);
    free(expected);
    free(got);
    free(again);
    CHECK(n_broken == 0, "K=%d %s: the path breaks at %zu places", K, codebook_name[codebook], n_broken);
    CHECK(same, "K=%d %s: a second search gives other codes", K, codebook_name[codebook]);
    CHECK(e < cpu * 1.001, "K=%d %s: error %.6g, on the CPU %.6g", K, codebook_name[codebook], e, cpu);
    CHECK(n_different == 0, "K=%d %s: %zu of %zu states differ from the CPU's (error %+.3g %%)", K, codebook_name[codebook],
          n_different, n_tiles * 256, 100 * (e / cpu - 1));
    return true;
}

static bool search_gives_the_codes_of_the_cpu_for_every_k_and_codebook(void)
{
    bool good = true;

    for (int K = 1; K <= 8; K++)
        for (int cb = 0; cb < 3; cb++)
            good = (is_left_out(K, cb) || check_search(&info, K, (x3_codebook)cb, n_search_tiles + 1)) && good;
    printf("    %zu tiles each\n", n_search_tiles + 1);
    return good;
}

static bool search_gives_the_same_codes_in_every_compiled_form(void)
{
    x3_cuda_info device = info;
    bool good = true;

    for (int multiprocessors = 2; multiprocessors <= 32; multiprocessors *= 4) /* few: more tiles a block */
        for (int K = 1; K <= 8; K++) {
            device.n_multiprocessors = multiprocessors;
            device.shared_bytes = info.shared_bytes;
            good = check_search(&device, K, X3_CB_MUL1, 21) && good;
            device.shared_bytes = 101376;
            good = check_search(&device, K, X3_CB_MUL1, 5) && good;
        }
    return good;
}

static bool search_recovers_tiles_that_lie_on_a_path(void)
{
    for (int K = 1; K <= 8; K++) {
        const size_t n_tiles = 8;
        float *all = (float *)malloc(X3_STATES * 4), *x = (float *)malloc(n_tiles * 1024);
        uint16_t states[256];
        uint32_t words[64];
        void *d_scratch = device_alloc(x3_cuda_search_bytes(&info, K));
        x3_codebook_values(X3_CB_MCG, all);
        for (size_t t = 0; t < n_tiles; t++) {
            for (int i = 0; i < 8 * K; i++)
                words[i] = noise(t * 64 + (size_t)i, (uint32_t)K);
            x3_tile_unpack(words, K, states);
            for (int p = 0; p < 256; p++)
                x[t * 256 + (size_t)p] = all[states[p]];
        }
        float *d_x = (float *)to_device(x, n_tiles * 1024);
        uint16_t *d_states = (uint16_t *)device_alloc(n_tiles * 512);
        MUST_X3(x3_cuda_search(&info, X3_CB_MCG, K, d_x, n_tiles, d_states, d_scratch, NULL, err));
        uint16_t *got = (uint16_t *)to_host(d_states, n_tiles * 512);
        for (size_t i = 0; i < n_tiles * 256; i++)
            CHECK(all[got[i]] == x[i], "K=%d: position %zu decodes to another value", K, i);
        cudaFree(d_x);
        cudaFree(d_states);
        cudaFree(d_scratch);
        free(all);
        free(x);
        free(got);
    }
    return true;
}

/* Two strips of different widths against a plain search of the gathered tiles. */
static bool check_strips(int K)
{
    const size_t cols[2] = {96, 160}, n_tiles = 16;
    float *target[2], *x = (float *)malloc(n_tiles * 1024), *values = (float *)malloc(X3_STATES * 4);
    x3_cuda_strip strips[2] = {};
    void *d_scratch = device_alloc(x3_cuda_search_bytes(&info, K));
    uint16_t *d_states = (uint16_t *)device_alloc(n_tiles * 512);
    size_t tile = 0;
    bool good = true;

    x3_codebook_values(X3_CB_MUL1, values);
    for (int s = 0; s < 2; s++) {
        const size_t ld = cols[s] + 4;
        target[s] = (float *)malloc(16 * ld * 4);
        for (size_t i = 0; i < 16 * ld; i++)
            target[s][i] = noise_normal(i, (uint32_t)(s + 50)) * 0.9f;
        for (size_t c = 0; c < cols[s]; c += 16, tile++)
            for (int p = 0; p < 256; p++)
                x[tile * 256 + (size_t)p] = target[s][(size_t)x3_tile_row(p) * ld + c + (size_t)x3_tile_column(p)];
        strips[s].n_out = cols[s];
        strips[s].d_target = (float *)to_device(target[s], 16 * ld * 4);
        strips[s].d_w = strips[s].d_target;
        strips[s].ld_target = strips[s].ld_w = ld;
        strips[s].ld_q = strips[s].ld_error = cols[s];
        strips[s].d_q = (float *)device_alloc(16 * cols[s] * 4);
        strips[s].d_error = (float *)device_alloc(16 * cols[s] * 4);
        strips[s].d_words = (uint32_t *)device_alloc(cols[s] / 16 * 32 * (size_t)K);
    }
    float *d_x = (float *)to_device(x, n_tiles * 1024);
    MUST_X3(x3_cuda_search(&info, X3_CB_MUL1, K, d_x, n_tiles, d_states, d_scratch, NULL, err));
    MUST_X3(x3_cuda_search_strips(&info, X3_CB_MUL1, K, strips, 2, d_scratch, NULL, err));
    uint16_t *states = (uint16_t *)to_host(d_states, n_tiles * 512);
    tile = 0;
    for (int s = 0; s < 2; s++) {
        float *q = (float *)to_host(strips[s].d_q, 16 * cols[s] * 4), *e = (float *)to_host(strips[s].d_error, 16 * cols[s] * 4);
        uint32_t *words = (uint32_t *)to_host(strips[s].d_words, cols[s] / 16 * 32 * (size_t)K);
        for (size_t c = 0; c < cols[s]; c += 16, tile++) {
            uint32_t packed[64];
            x3_tile_pack(states + tile * 256, K, packed);
            good = good && memcmp(packed, words + c / 16 * 8 * (size_t)K, 32 * (size_t)K) == 0;
            for (int p = 0; p < 256; p++) {
                const size_t row = (size_t)x3_tile_row(p), at = row * cols[s] + c + (size_t)x3_tile_column(p);
                const float value = values[states[tile * 256 + (size_t)p]];
                good = good && q[at] == value && e[at] == target[s][row * (cols[s] + 4) + c + (size_t)x3_tile_column(p)] - value;
            }
        }
        free(q);
        free(e);
        free(words);
        free(target[s]);
        cudaFree((void *)strips[s].d_target);
        cudaFree(strips[s].d_q);
        cudaFree(strips[s].d_error);
        cudaFree(strips[s].d_words);
    }
    cudaFree(d_x);
    cudaFree(d_scratch);
    cudaFree(d_states);
    free(x);
    free(values);
    free(states);
    CHECK(good, "K=%d: strips differ from a search of their tiles", K);
    return true;
}

static bool search_of_strips_gathers_packs_and_scatters(void)
{
    bool good = true;

    for (int K = 1; K <= 8; K++)
        good = check_strips(K) && good;
    return good;
}

/* ---- runner -------------------------------------------------------------------------------------------------------- */

#define TEST(f) {#f, f}

static const struct {
    const char *name;
    bool (*run)(void);
} tests[] = {
    TEST(reconstruction_equals_the_cpu_for_all_states_k_and_codebooks),
    TEST(linear_is_near_the_float64_product),
    TEST(linear_rows_do_not_depend_on_other_rows_1_to_128),
    TEST(linears_of_one_input_are_one_product),
    TEST(linear_gives_the_same_bits_with_less_shared_memory),
    TEST(linear_takes_and_gives_float16),
    TEST(linear_can_be_captured_in_a_graph),
    TEST(linear_over_a_matrix_product_is_near_the_float64_product),
    TEST(linear_refuses_what_it_cannot_do),
    TEST(search_recovers_tiles_that_lie_on_a_path),
    TEST(search_gives_the_codes_of_the_cpu_for_every_k_and_codebook),
    TEST(search_gives_the_same_codes_in_every_compiled_form),
    TEST(search_of_strips_gathers_packs_and_scatters),
};

static bool wanted(const char *name, int argc, char **argv)
{
    bool any_word = false;

    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--tiles") == 0 || strcmp(argv[i], "--k") == 0) {
            i++;
            continue;
        }
        if (strcmp(argv[i], "--quick") == 0)
            continue;
        any_word = true;
        if (strstr(name, argv[i]) != NULL)
            return true;
    }
    return !any_word;
}

int main(int argc, char **argv)
{
    int n_devices = 0, passed = 0, failed = 0, skipped = 0;

    for (int i = 1; i < argc; i++)
        quick = quick || strcmp(argv[i], "--quick") == 0;
    for (int i = 1; i + 1 < argc; i++)
        if (strcmp(argv[i], "--tiles") == 0)
            n_search_tiles = (size_t)atoi(argv[i + 1]);
        else if (strcmp(argv[i], "--k") == 0)
            only_k = atoi(argv[i + 1]);
    MUST_X3(x3_cuda_count(&n_devices, err));
    MUST_X3(x3_pool_create(&pool, 0, err));
    if (n_devices > 0) {
        MUST_X3(x3_cuda_open(0, &info, err));
        printf("%s, compute capability %d, %d multiprocessors, %zu bytes shared\n", info.name, info.compute_capability,
               info.n_multiprocessors, info.shared_bytes);
    }
    for (size_t i = 0; i < sizeof tests / sizeof tests[0]; i++) {
        if (!wanted(tests[i].name, argc, argv))
            continue;
        if (n_devices == 0) {
            printf("SKIP %s: no GPU\n", tests[i].name);
            skipped++;
            continue;
        }
        const double start = x3_seconds();
        bool good = tests[i].run();
        MUST(cudaDeviceSynchronize());
        printf("%s %s (%.1f s)\n", good ? "PASS" : "FAIL", tests[i].name, x3_seconds() - start);
        fflush(stdout);
        passed += good;
        failed += !good;
    }
    x3_pool_free(pool);
    printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped);
    return failed > 0 || passed + skipped == 0;
}
