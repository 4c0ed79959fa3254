/* Times of the CUDA kernels beside the peer's (../shared/golden/README.md: exllamav3 1.4.1 on one H200).
 *
 *     bench_kernels [linear] [codebooks] [rows] [gemm] [search]      all parts without a word
 *
 * Linear: weights rotate among enough copies that each call reads them from memory; a graph holds one call a copy, in
 * order over one scratch; the time is the median replay over its calls, Hadamards and all included. */
#include <cublas_v2.h>

#include "tests/cuda/cuda_test.cuh"

static x3_cuda_info info;

static int compare_floats(const void *a, const void *b)
{
    const float x = *(const float *)a, y = *(const float *)b;

    return (x > y) - (x < y);
}

static float median(float *x, int n)
{
    qsort(x, (size_t)n, sizeof *x, compare_floats);
    return x[n / 2];
}

#define REPLAYS 21

/* Median microseconds of one call in a replayed graph of n_calls. */
static float time_graph(cudaStream_t stream, cudaGraph_t graph, int n_calls)
{
    cudaGraphExec_t exec;
    cudaEvent_t begin, end;
    float ms[REPLAYS];

    MUST(cudaGraphInstantiate(&exec, graph, 0));
    MUST(cudaEventCreate(&begin));
    MUST(cudaEventCreate(&end));
    for (int i = -3; i < REPLAYS; i++) {
        MUST(cudaEventRecord(begin, stream));
        MUST(cudaGraphLaunch(exec, stream));
        MUST(cudaEventRecord(end, stream));
        MUST(cudaStreamSynchronize(stream));
        if (i >= 0)
            MUST(cudaEventElapsedTime(&ms[i], begin, end));
    }
    MUST(cudaEventDestroy(begin));
    MUST(cudaEventDestroy(end));
    MUST(cudaGraphExecDestroy(exec));
    MUST(cudaGraphDestroy(graph));
    return median(ms, REPLAYS) * 1000 / (float)n_calls;
}

/* One shape and K, with as many copies of the words as pass the second-level cache several times over. */
typedef struct bench_group {
    x3_cuda_group g;
    int n_copies;
    uint32_t *copies[64];
    float *d_x, *d_y;
    void *d_scratch;
    double *exact; /* of 4 rows */
} bench_group;

static bench_group bench_create(int K, x3_codebook codebook, size_t n_in, size_t n_out)
{
    bench_group b = {};
    const size_t bytes = n_in * n_out * (size_t)K / 8;
    float *d_wq = (float *)device_alloc(n_in * n_out * 4);

    b.g = group_create(K, codebook, n_in, n_out, false, 5);
    b.n_copies = (int)x3_min_size(64, x3_max_size(4, ((size_t)320 << 20) / bytes + 1));
    b.copies[0] = (uint32_t *)b.g.d_words;
    for (int i = 1; i < b.n_copies; i++) {
        b.copies[i] = (uint32_t *)device_alloc(bytes);
        fill_noise<<<512, 256>>>(b.copies[i], bytes / 4, (uint32_t)i + 77);
    }
    b.d_x = (float *)device_alloc(128 * n_in * 4);
    b.d_y = (float *)device_alloc(128 * n_out * 4);
    b.d_scratch = device_alloc(x3_cuda_linear_bytes(&info, &b.g, 1, 128));
    fill_normal<<<256, 256>>>(b.d_x, 128 * n_in, 9, 1.0f);
    MUST_X3(x3_cuda_reconstruct(&info, &b.g, d_wq, X3_CUDA_F32, NULL, err));
    float *x = (float *)to_host(b.d_x, 4 * n_in * 4);
    b.exact = linear_f64(&b.g, d_wq, x, 4);
    free(x);
    cudaFree(d_wq);
    return b;
}

static void bench_free(bench_group *b)
{
    for (int i = 1; i < b->n_copies; i++)
        cudaFree(b->copies[i]);
    group_free(&b->g);
    cudaFree(b->d_x);
    cudaFree(b->d_y);
    cudaFree(b->d_scratch);
    free(b->exact);
}

/* Microseconds of one call of n_rows rows; *error of its first rows. */
static float bench_rows(bench_group *b, size_t n_rows, bool overlap, double *error)
{
    cudaStream_t stream;
    cudaGraph_t graph;
    const x3_cuda_rows rows = {n_rows, b->d_x, X3_CUDA_F32, b->g.n_in, b->d_y, X3_CUDA_F32, b->g.n_out, NULL};
    x3_cuda_group g = b->g;

    MUST(cudaDeviceSynchronize());
    MUST(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    MUST(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = b->n_copies - 1; i >= 0; i--) { /* copy 0 last: its result stays for the error */
        g.d_words = b->copies[i];
        MUST_X3(x3_cuda_linear(&info, &g, &rows, overlap, b->d_scratch, stream, err));
    }
    MUST(cudaStreamEndCapture(stream, &graph));
    const float us = time_graph(stream, graph, b->n_copies);
    const size_t n = x3_min_size(n_rows, 4) * g.n_out;
    float *y = (float *)to_host(b->d_y, n * 4);
    *error = relative_error(y, b->exact, n);
    free(y);
    MUST(cudaStreamDestroy(stream));
    return us;
}

static void bench_one_row(size_t n_in, size_t n_out, x3_codebook codebook, const float *peer)
{
    printf("\nlinear %zux%zu, %s, 1 row, us   (weights alone at 4.3 TB/s | peer / ours | relative error)\n", n_in, n_out,
           codebook_name[codebook]);
    printf("  K    ours  apart    peer   ratio   floor     error\n");
    for (int K = 1; K <= 8; K++) {
        bench_group b = bench_create(K, codebook, n_in, n_out);
        double error, unused;
        const float us = bench_rows(&b, 1, true, &error), apart = bench_rows(&b, 1, false, &unused);
        const float floor_us = (float)((double)(n_in * n_out) * K / 8 / 4.3e6);
        if (peer != NULL && peer[K - 1] > 0)
            printf("  %d  %6.1f %6.1f  %6.1f  %5.2fx  %6.1f  %.2e\n", K, us, apart, peer[K - 1], peer[K - 1] / us, floor_us, error);
        else
            printf("  %d  %6.1f %6.1f       -       -  %6.1f  %.2e\n", K, us, apart, floor_us, error);
        fflush(stdout);
        bench_free(&b);
    }
}

static void bench_linear(void)
{
    static const float square[] = {27.9f, 28.6f, 30.4f, 40.2f, 28.7f, 34.5f, 0, 50.5f};
    static const float small[] = {13.1f, 13.8f, 16.3f, 17.2f, 14.9f, 17.7f, 0, 25.1f};
    static const float wide[] = {27.0f, 27.6f, 31.8f, 30.5f, 26.8f, 32.8f, 0, 42.1f};

    bench_one_row(8192, 8192, X3_CB_MUL1, square);
    bench_one_row(4096, 4096, X3_CB_MUL1, small);
    bench_one_row(4096, 14336, X3_CB_MUL1, wide);
}

static void bench_codebooks(void)
{
    bench_one_row(8192, 8192, X3_CB_MCG, NULL);
    bench_one_row(8192, 8192, X3_CB_3INST, NULL);
}

static void bench_more_rows(void)
{
    static const size_t counts[] = {2, 4, 8, 16, 32, 64, 128};
    static const float peer[8][7] = {
        {0, 43.7f, 0, 48.0f, 0, 0, 0},     {0, 32.6f, 0, 47.8f, 0, 178, 352}, {0, 36.9f, 0, 53.2f, 0, 198, 391},
        {0, 40.2f, 0, 55.8f, 0, 207, 362}, {0, 48.7f, 0, 56.7f, 0, 0, 0},     {0, 48.8f, 0, 56.8f, 0, 0, 0},
        {0, 0, 0, 0, 0, 0, 0},             {0, 50.6f, 0, 54.4f, 0, 0, 0},
    };

    printf("\nlinear 8192x8192, mul1, us, and peer / ours\n  K ");
    for (size_t n : counts)
        printf("  %5zu rows   ", n);
    printf("  error\n");
    for (int K = 1; K <= 8; K++) {
        bench_group b = bench_create(K, X3_CB_MUL1, 8192, 8192);
        double error = 0, worst = 0;
        printf("  %d ", K);
        for (int i = 0; i < 7; i++) {
            const float us = bench_rows(&b, counts[i], true, &error);
            worst = error > worst ? error : worst;
            if (peer[K - 1][i] > 0)
                printf("  %6.1f %4.1fx ", us, peer[K - 1][i] / us);
            else
                printf("  %6.1f       ", us);
        }
        printf("  %.2e\n", worst);
        fflush(stdout);
        bench_free(&b);
    }
}

/* ---- many rows ------------------------------------------------------------------------------------------------------ */

static void must_blas(cublasStatus_t status, const char *what)
{
    if (status != CUBLAS_STATUS_SUCCESS) {
        printf("%s: %s\n", what, cublasGetStatusString(status));
        exit(1);
    }
}

/* what 0: plain float16 product; 1: EXL3, float16 rows; 2: EXL3, float32 rows; 3: reconstruction alone; 4: the
 * dense weight alone. */
static float time_many(cublasHandle_t blas, const x3_cuda_group *g, size_t n_rows, int what)
{
    cudaStream_t stream;
    cudaEvent_t begin, end;
    float ms[REPLAYS];
    const size_t n_in = g->n_in, n_out = g->n_out;
    float *d_x = (float *)device_alloc(n_rows * n_in * 4), *d_y = (float *)device_alloc(n_rows * n_out * 4);
    __half *d_x16 = (__half *)device_alloc(n_rows * n_in * 2), *d_w = (__half *)device_alloc(n_in * n_out * 2);
    void *d_scratch = device_alloc(x3_cuda_linear_gemm_bytes(g, n_rows, X3_CUDA_F32));
    const x3_cuda_type type = what == 1 ? X3_CUDA_F16 : X3_CUDA_F32;
    const x3_cuda_rows rows = {n_rows, what == 1 ? (void *)d_x16 : d_x, type, n_in, d_y, type, n_out, NULL};
    const float one = 1, zero = 0;

    fill_normal<<<512, 256>>>(d_x, n_rows * n_in, 3, 1.0f);
    halve<<<512, 256>>>(d_x, d_x16, n_rows * n_in);
    MUST_X3(x3_cuda_reconstruct(&info, g, d_w, X3_CUDA_F16, NULL, err));
    MUST(cudaDeviceSynchronize());
    MUST(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    MUST(cudaEventCreate(&begin));
    MUST(cudaEventCreate(&end));
    for (int i = -3; i < REPLAYS; i++) {
        MUST(cudaEventRecord(begin, stream));
        if (what == 0) {
            must_blas(cublasSetStream(blas, stream), "stream");
            must_blas(cublasGemmEx(blas, CUBLAS_OP_N, CUBLAS_OP_N, (int)n_out, (int)n_rows, (int)n_in, &one, d_w, CUDA_R_16F,
                                   (int)n_out, d_x16, CUDA_R_16F, (int)n_in, &zero, d_y, CUDA_R_16F, (int)n_out,
                                   CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT), "product");
        } else if (what == 3) {
            MUST_X3(x3_cuda_reconstruct(&info, g, d_w, X3_CUDA_F16, stream, err));
        } else if (what == 4) {
            MUST_X3(x3_cuda_dense(&info, g, d_w, stream, err));
        } else {
            MUST_X3(x3_cuda_linear_gemm(&info, blas, g, &rows, d_scratch, stream, err));
        }
        MUST(cudaEventRecord(end, stream));
        MUST(cudaStreamSynchronize(stream));
        if (i >= 0)
            MUST(cudaEventElapsedTime(&ms[i], begin, end));
    }
    MUST(cudaEventDestroy(begin));
    MUST(cudaEventDestroy(end));
    MUST(cudaStreamDestroy(stream));
    cudaFree(d_x);
    cudaFree(d_y);
    cudaFree(d_x16);
    cudaFree(d_w);
    cudaFree(d_scratch);
    return median(ms, REPLAYS) * 1000;
}

static void bench_gemm(void)
{
    static const float peer[] = {0, 472, 479, 480};
    const size_t n = 8192, n_rows = 2048;
    cublasHandle_t blas;

    must_blas(cublasCreate(&blas), "cuBLAS");
    printf("\nlinear 8192x8192, mul1, 2048 rows, us   (share: plain product's time over ours)\n");
    printf("  K   plain  f16 rows  share  f32 rows  share    peer  reconstruct  GB/s   dense\n");
    for (int K = 2; K <= 4; K++) {
        x3_cuda_group g = group_create(K, X3_CB_MUL1, n, n, false, 3);
        const float plain = time_many(blas, &g, n_rows, 0), half = time_many(blas, &g, n_rows, 1);
        const float single = time_many(blas, &g, n_rows, 2), alone = time_many(blas, &g, n_rows, 3);
        const float dense = time_many(blas, &g, n_rows, 4);
        printf("  %d  %6.1f    %6.1f  %4.0f%%    %6.1f  %4.0f%%  %6.1f       %6.1f  %.0f  %6.1f\n", K, plain, half, 100 * plain / half,
               single, 100 * plain / single, peer[K - 1], alone, (double)(n * n) * (2 + K / 8.0) / alone / 1000, dense);
        group_free(&g);
    }
    cublasDestroy(blas);
}

/* ---- search --------------------------------------------------------------------------------------------------------- */

static float time_search(x3_codebook codebook, int K, const float *d_x, size_t n_tiles, uint16_t *d_states, void *d_scratch)
{
    cudaEvent_t begin, end;
    float ms[5];

    MUST(cudaEventCreate(&begin));
    MUST(cudaEventCreate(&end));
    for (int i = -1; i < 5; i++) {
        MUST(cudaEventRecord(begin));
        MUST_X3(x3_cuda_search(&info, codebook, K, d_x, n_tiles, d_states, d_scratch, NULL, err));
        MUST(cudaEventRecord(end));
        MUST(cudaDeviceSynchronize());
        if (i >= 0)
            MUST(cudaEventElapsedTime(&ms[i], begin, end));
    }
    MUST(cudaEventDestroy(begin));
    MUST(cudaEventDestroy(end));
    return median(ms, 5);
}

static void bench_search(void)
{
    static const float peer[] = {7.6f, 16.7f, 19.0f, 19.9f, 21.6f, 22.6f, 21.8f, 18.6f};
    const size_t n_tiles = (size_t)info.n_multiprocessors * 16;
    float *d_x = (float *)device_alloc(n_tiles * 1024);
    uint16_t *d_states = (uint16_t *)device_alloc(n_tiles * 512);

    printf("\ntile encoder, million weights/s, %zu tiles; a row of tiles: us for 4096, 8192, 14336 columns (mul1)\n", n_tiles);
    printf("  K    mul1     mcg   3inst    peer   ratio     4096    8192   14336   scratch MB\n");
    for (int K = 1; K <= 8; K++) {
        void *d_scratch = device_alloc(x3_cuda_search_bytes(&info, K));
        float rate[3];
        for (int cb = 0; cb < 3; cb++) {
            fill_normal<<<256, 256>>>(d_x, n_tiles * 256, 31, (float)nominal_scale((x3_codebook)cb, K));
            rate[cb] = (float)n_tiles * 256 / 1000 / time_search((x3_codebook)cb, K, d_x, n_tiles, d_states, d_scratch);
        }
        printf("  %d  %6.1f  %6.1f  %6.1f  %6.1f  %5.2fx ", K, rate[2], rate[1], rate[0], peer[K - 1], rate[2] / peer[K - 1]);
        static const size_t widths[] = {4096, 8192, 14336};
        for (size_t w : widths)
            printf("  %6.0f", time_search(X3_CB_MUL1, K, d_x, w / 16, d_states, d_scratch) * 1000);
        printf("   %6.0f\n", (double)x3_cuda_search_bytes(&info, K) / 1e6);
        fflush(stdout);
        cudaFree(d_scratch);
    }
    cudaFree(d_x);
    cudaFree(d_states);
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        void (*run)(void);
    } parts[] = {{"linear", bench_linear}, {"rows", bench_more_rows}, {"gemm", bench_gemm}, {"search", bench_search},
                 {"codebooks", bench_codebooks}};
    int n_devices = 0;

    MUST_X3(x3_cuda_count(&n_devices, err));
    if (n_devices == 0) {
        printf("no GPU\n");
        return 0;
    }
    MUST_X3(x3_cuda_open(0, &info, err));
    printf("%s, %d multiprocessors, %zu bytes shared\n", info.name, info.n_multiprocessors, info.shared_bytes);
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
        bool run = argc == 1;
        for (int j = 1; j < argc; j++)
            run = run || strcmp(argv[j], parts[i].name) == 0;
        if (run)
            parts[i].run();
    }
    return 0;
}
