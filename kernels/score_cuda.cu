/* Comparing rows of logits on the GPU: x3_score_row_ref with a block of threads a row. Sums run in strides of the block, then
 * in a fixed tree. */
#include "kernels/cuda_ops.h"
#include "kernels/cuda_common.cuh"

#define THREADS 256
#define WARPS (THREADS / X3_WARP)

typedef struct best_logit {
    float value;
    int at;
} best_logit;

/* Sum over the block, the same in all threads. `room` has WARPS places. */
static __device__ double block_sum(double v, double *room)
{
    for (int lanes = X3_WARP / 2; lanes > 0; lanes /= 2)
        v += __shfl_xor_sync(X3_ALL_LANES, v, lanes);
    __syncthreads();
    if (threadIdx.x % X3_WARP == 0)
        room[threadIdx.x / X3_WARP] = v;
    __syncthreads();
    v = 0;
    for (int w = 0; w < WARPS; w++)
        v += room[w];
    return v;
}

static __device__ __forceinline__ best_logit better(best_logit a, best_logit b)
{
    return b.value > a.value || (b.value == a.value && b.at < a.at) ? b : a;
}

/* The largest logit, the first of equal ones; *finite is false in all threads when any is not. */
static __device__ best_logit block_best(const float *x, size_t vocab, best_logit *room, bool *finite)
{
    best_logit best = {-CUDART_INF_F, INT32_MAX};
    int bad = 0;

    for (size_t i = threadIdx.x; i < vocab; i += THREADS) {
        const best_logit one = {x[i], (int)i};
        bad |= !isfinite(x[i]);
        best = better(best, one);
    }
    for (int lanes = 1; lanes < X3_WARP; lanes *= 2) {
        best_logit other = {__shfl_xor_sync(X3_ALL_LANES, best.value, lanes), __shfl_xor_sync(X3_ALL_LANES, best.at, lanes)};
        best = better(best, other);
    }
    *finite = __syncthreads_or(bad) == 0;
    if (threadIdx.x % X3_WARP == 0)
        room[threadIdx.x / X3_WARP] = best;
    __syncthreads();
    best = room[0];
    for (int w = 1; w < WARPS; w++)
        best = better(best, room[w]);
    __syncthreads();
    return best;
}

static __device__ double log_sum_exp(const float *x, size_t vocab, float max, double *room)
{
    double sum = 0;

    for (size_t i = threadIdx.x; i < vocab; i += THREADS)
        sum += exp((double)x[i] - (double)max);
    return log(block_sum(sum, room));
}

static __global__ void __launch_bounds__(THREADS) score(const float *reference, const float *pack, size_t vocab,
                                                        const int32_t *next, x3_score_position *out)
{
    __shared__ best_logit bests[WARPS];
    __shared__ double room[WARPS];
    const float *r = reference + blockIdx.x * vocab, *q = pack + blockIdx.x * vocab;
    x3_score_position s = {};
    bool r_finite, q_finite;
    const best_logit r_best = block_best(r, vocab, bests, &r_finite), q_best = block_best(q, vocab, bests, &q_finite);

    if (r_finite && q_finite) {
        const double r_log = log_sum_exp(r, vocab, r_best.value, room), q_log = log_sum_exp(q, vocab, q_best.value, room);
        double kl = 0, n_better = 0;
        const float at_best = q[r_best.at];
        for (size_t i = threadIdx.x; i < vocab; i += THREADS) {
            const double a = (double)r[i] - r_best.value - r_log, b = (double)q[i] - q_best.value - q_log;
            kl += exp(a) * (a - b);
            n_better += q[i] > at_best || (q[i] == at_best && (int)i < r_best.at);
        }
        s.finite = true;
        s.kl = block_sum(kl, room);
        s.top1 = r_best.at == q_best.at;
        s.top5 = block_sum(n_better, room) < 5;
        const int32_t id = next[blockIdx.x];
        if (id >= 0) {
            s.nll_reference = -((double)r[id] - r_best.value - r_log);
            s.nll_pack = -((double)q[id] - q_best.value - q_log);
        }
    }
    if (threadIdx.x == 0)
        out[blockIdx.x] = s;
}

x3_status x3_cuda_score(const float *d_reference, const float *d_pack, size_t n_rows, size_t vocab, const int32_t *d_next,
                        x3_score_position *d_out, x3_cuda_stream stream, x3_err *err)
{
    if (n_rows == 0)
        return X3_OK;
    score<<<(unsigned)n_rows, THREADS, 0, stream>>>(d_reference, d_pack, vocab, d_next, d_out);
    return x3_cuda_check(cudaGetLastError(), "comparing logits", err);
}
