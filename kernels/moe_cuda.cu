/* Routing of rows to experts and back on the GPU. */
#include "kernels/cuda_moe.h"
#include "kernels/cuda_common.cuh"

#define THREADS 256

static dim3 flat_grid(size_t n)
{
    return dim3((unsigned)((n + THREADS - 1) / THREADS));
}

/* ---- route ------------------------------------------------------------------------------------------------------------- */

#define ROUTE_WARPS 4
#define LAST (-1e30f) /* as in route_ref.c */

static __device__ __forceinline__ void make_scores(const x3_route_rule &r, const float *logits, float *scores, int lane)
{
    const int n = (int)r.n_experts;
    float top = -CUDART_INF_F, sum = 0;

    if (r.scores == X3_ROUTE_SIGMOID) {
        bool finite = true;
        for (int e = lane; e < n; e += X3_WARP)
            finite &= isfinite(logits[e]) != 0;
        finite = __all_sync(X3_ALL_LANES, finite);
        for (int e = lane; e < n; e += X3_WARP)
            scores[e] = finite ? 1.0f / (1.0f + exp_exact(-logits[e])) : CUDART_NAN_F;
        __syncwarp();
        return;
    }
    for (int e = lane; e < n; e += X3_WARP)
        top = fmaxf(top, logits[e]);
    for (int lanes = X3_WARP / 2; lanes > 0; lanes /= 2)
        top = fmaxf(top, __shfl_xor_sync(X3_ALL_LANES, top, lanes));
    for (int e = lane; e < n; e += X3_WARP)
        scores[e] = isfinite(logits[e]) ? exp_exact(logits[e] - top) : CUDART_NAN_F;
    __syncwarp();
    for (int e = 0; e < n; e++) /* from the first to the last, in every lane */
        sum += scores[e];
    __syncwarp();
    for (int e = lane; e < n; e += X3_WARP)
        scores[e] /= sum;
    __syncwarp();
}

/* Index of the largest value, the first of equals, in all lanes; it becomes minus infinity. */
static __device__ __forceinline__ int take_best(float *x, int n, int lane)
{
    float best = -CUDART_INF_F;
    int at = n;

    for (int i = lane; i < n; i += X3_WARP)
        if (at == n || x[i] > best) {
            best = x[i];
            at = i;
        }
    for (int lanes = X3_WARP / 2; lanes > 0; lanes /= 2) {
        const float other = __shfl_xor_sync(X3_ALL_LANES, best, lanes);
        const int other_at = __shfl_xor_sync(X3_ALL_LANES, at, lanes);
        if (other > best || (other == best && other_at < at)) {
            best = other;
            at = other_at;
        }
    }
    __syncwarp(); /* all lanes have read: a shuffle orders registers, not shared memory */
    if (lane == 0)
        x[at] = -CUDART_INF_F;
    __syncwarp();
    return at;
}

static __device__ __forceinline__ float two_best(const float *x, int n)
{
    float first = LAST, second = LAST;

    for (int i = 0; i < n; i++)
        if (x[i] > first) {
            second = first;
            first = x[i];
        } else if (x[i] > second) {
            second = x[i];
        }
    return first + second;
}

static __device__ __forceinline__ void mask_groups(const x3_route_rule &r, float *choice, float *group, int lane)
{
    const int n_groups = (int)r.n_groups, size = (int)r.n_experts / n_groups;

    for (int g = lane; g < n_groups; g += X3_WARP)
        group[g] = two_best(choice + g * size, size);
    __syncwarp();
    for (int n = 0; n < (int)r.n_chosen_groups; n++)
        (void)take_best(group, n_groups, lane);
    for (int e = lane; e < (int)r.n_experts; e += X3_WARP)
        if (group[e / size] != -CUDART_INF_F)
            choice[e] = LAST;
    __syncwarp();
}

/* A warp a row. Shared memory a warp: scores, choice [n_experts], groups [n_groups]. */
static __global__ void __launch_bounds__(ROUTE_WARPS *X3_WARP)
    route(const x3_route_rule r, const float *logits, const float *correction, size_t n_rows, int32_t *ids, float *weights)
{
    extern __shared__ float room[];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, n = (int)r.n_experts, n_chosen = (int)r.n_chosen;
    const size_t row = (size_t)blockIdx.x * ROUTE_WARPS + warp;
    float *scores = room + (size_t)warp * (2 * r.n_experts + r.n_groups), *choice = scores + n;
    float sum = 0;

    if (row >= n_rows)
        return;
    make_scores(r, logits + row * r.n_experts, scores, lane);
    for (int e = lane; e < n; e += X3_WARP) {
        const float c = correction == NULL ? scores[e] : scores[e] + correction[e];
        choice[e] = c > LAST ? c : LAST; /* NaN too */
    }
    __syncwarp();
    if (r.n_groups > 1)
        mask_groups(r, choice, choice + n, lane);
    ids += row * r.n_chosen;
    weights += row * r.n_chosen;
    for (int j = 0; j < n_chosen; j++) {
        const int e = take_best(choice, n, lane);
        sum += scores[e];
        if (lane == 0)
            ids[j] = e;
    }
    __syncwarp();
    for (int j = lane; j < n_chosen; j += X3_WARP) {
        const float w = scores[ids[j]];
        weights[j] = (r.normalize ? w / (sum + 1e-20f) : w) * r.scale;
    }
}

x3_status x3_cuda_route(const x3_cuda_info *info, const x3_route_rule *rule, const float *d_logits, const float *d_correction,
                        size_t n_rows, int32_t *d_ids, float *d_weights, x3_cuda_stream stream, x3_err *err)
{
    const size_t shared_bytes = ROUTE_WARPS * (2 * rule->n_experts + rule->n_groups) * sizeof(float);
    x3_route_rule r = *rule;

    if (n_rows == 0)
        return X3_OK;
    if (shared_bytes > info->shared_bytes)
        return x3_fail(err, X3_ERR_UNSUPPORTED, "routing among %zu experts: %zu at most", rule->n_experts,
                       info->shared_bytes / ROUTE_WARPS / 2 / sizeof(float) - rule->n_groups);
    void *args[] = {&r, &d_logits, &d_correction, &n_rows, &d_ids, &d_weights};
    return x3_cuda_launch(info, (const void *)route, dim3((unsigned)((n_rows + ROUTE_WARPS - 1) / ROUTE_WARPS)),
                          ROUTE_WARPS * X3_WARP, shared_bytes, false, stream, args, "routing", err);
}

/* ---- groups -------------------------------------------------------------------------------------------------------------- */

#define GROUP_THREADS 512
#define GROUP_WARPS (GROUP_THREADS / X3_WARP)

/* A block an expert: how many ids are smaller, then its own ones in order. Counts only, so nothing depends on what runs when. */
static __global__ void __launch_bounds__(GROUP_THREADS)
    group_rows(const int32_t *ids, int n_slots, int n_chosen, int n_experts, int32_t *first, int32_t *rows, int32_t *slots)
{
    __shared__ int counts[2][GROUP_WARPS];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, expert = blockIdx.x;
    int smaller = 0, base = 0, now = 0;

    for (int i = threadIdx.x; i < n_slots; i += GROUP_THREADS)
        smaller += ids[i] < expert;
    smaller = __reduce_add_sync(X3_ALL_LANES, smaller);
    if (lane == 0)
        counts[1][warp] = smaller;
    __syncthreads();
    for (int w = 0; w < GROUP_WARPS; w++)
        base += counts[1][w];
    if (threadIdx.x == 0) {
        first[expert] = base;
        if (expert == 0)
            first[n_experts] = n_slots;
    }
    for (int start = 0; start < n_slots; start += GROUP_THREADS, now ^= 1) {
        const int i = start + threadIdx.x;
        const bool mine = i < n_slots && ids[i] == expert;
        const uint32_t lanes = __ballot_sync(X3_ALL_LANES, mine);
        int at = base + __popc(lanes & ((1u << lane) - 1));
        if (lane == 0)
            counts[now][warp] = __popc(lanes);
        __syncthreads();
        for (int w = 0; w < GROUP_WARPS; w++) {
            at += w < warp ? counts[now][w] : 0;
            base += counts[now][w];
        }
        if (mine) {
            slots[i] = at;
            rows[at] = i / n_chosen;
        }
    }
}

x3_status x3_cuda_group_rows(const int32_t *d_ids, size_t n_rows, size_t n_chosen, size_t n_experts, int32_t *d_first,
                             int32_t *d_rows, int32_t *d_slots, x3_cuda_stream stream, x3_err *err)
{
    const size_t n_slots = n_rows * n_chosen;

    if (n_slots > INT32_MAX / 2)
        return x3_fail(err, X3_ERR_INPUT, "%zu rows with %zu experts each are too many", n_rows, n_chosen);
    group_rows<<<(unsigned)n_experts, GROUP_THREADS, 0, stream>>>(d_ids, (int)n_slots, (int)n_chosen, (int)n_experts, d_first,
                                                                  d_rows, d_slots);
    return x3_cuda_check(cudaGetLastError(), "grouping rows by expert", err);
}

/* ---- rows ---------------------------------------------------------------------------------------------------------------- */

/* Four floats at a time where rows allow it; n counts these. */
template <typename T> static __global__ void __launch_bounds__(THREADS) gather(const T *x, const int32_t *rows, size_t n_rows,
                                                                              size_t n, T *out)
{
    const size_t at = (size_t)blockIdx.x * THREADS + threadIdx.x, row = at / n;

    if (row < n_rows)
        out[at] = x[(size_t)rows[row] * n + at % n];
}

x3_status x3_cuda_gather_rows(const float *d_x, const int32_t *d_rows, size_t n_rows, size_t n, float *d_out,
                              x3_cuda_stream stream, x3_err *err)
{
    if (n_rows * n == 0)
        return X3_OK;
    if (n % 4 == 0 && ((uintptr_t)d_x | (uintptr_t)d_out) % 16 == 0)
        gather<<<flat_grid(n_rows * n / 4), THREADS, 0, stream>>>((const float4 *)d_x, d_rows, n_rows, n / 4, (float4 *)d_out);
    else
        gather<<<flat_grid(n_rows * n), THREADS, 0, stream>>>(d_x, d_rows, n_rows, n, d_out);
    return x3_cuda_check(cudaGetLastError(), "gathering rows", err);
}

static __global__ void __launch_bounds__(THREADS) combine(const float *y, const int32_t *slots, const float *weights,
                                                          size_t n_rows, int n_chosen, size_t n, bool add, float *out)
{
    const size_t at = (size_t)blockIdx.x * THREADS + threadIdx.x, row = at / n, i = at % n;

    if (row >= n_rows)
        return;
    float sum = add ? out[at] : 0.0f;
    for (int j = 0; j < n_chosen; j++)
        sum += weights[row * n_chosen + j] * y[(size_t)slots[row * n_chosen + j] * n + i];
    out[at] = sum;
}

x3_status x3_cuda_combine_rows(const float *d_y, const int32_t *d_slots, const float *d_weights, size_t n_rows, size_t n_chosen,
                               size_t n, bool add, float *d_out, x3_cuda_stream stream, x3_err *err)
{
    if (n_rows * n == 0)
        return X3_OK;
    combine<<<flat_grid(n_rows * n), THREADS, 0, stream>>>(d_y, d_slots, d_weights, n_rows, (int)n_chosen, n, add, d_out);
    return x3_cuda_check(cudaGetLastError(), "combining experts", err);
}

static __global__ void __launch_bounds__(THREADS) sigmoid_mul(float *x, const float *gate, size_t n, size_t per_gate)
{
    const size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x;

    if (i < n)
        x[i] *= 1.0f / (1.0f + exp_exact(-gate[per_gate == 1 ? i : i / per_gate]));
}

x3_status x3_cuda_sigmoid_mul(float *d_x, const float *d_gate, size_t n, size_t per_gate, x3_cuda_stream stream, x3_err *err)
{
    if (n == 0)
        return X3_OK;
    sigmoid_mul<<<flat_grid(n), THREADS, 0, stream>>>(d_x, d_gate, n, per_gate);
    return x3_cuda_check(cudaGetLastError(), "gating", err);
}
