/* EXL3 linears of many experts: rows as operands, and the host side of experts_exl3_cuda.cu. */
#include "kernels/experts_cuda.cuh"

#define ROTATE_WARPS 8

typedef struct rotate_args {
    x3_cuda_slots slots;
    const x3_cuda_expert *experts;
    int n_in, n_blocks; /* blocks: of 128 inputs */
    int first_slot;
    uint32_t *parts; /* [slot][unit][4][4]: high 0 .. 7, 8 .. 15, low likewise */
    float *unit;
    bool whole;
} rotate_args;

/* The expert whose slot this is, -1: none. */
static __device__ __forceinline__ int expert_of(const x3_cuda_slots &s, int slot)
{
    int low = 0, high = (int)s.n_experts;

    if (slot < s.d_first[0] || slot >= s.d_first[high])
        return -1;
    while (high - low > 1) { /* first[low] <= slot < first[high] */
        const int middle = (low + high) / 2;
        if (s.d_first[middle] <= slot)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* 4 numbers to the operand's words: as rotate_inputs and operand_word in linear_cuda.cuh. */
static __device__ __forceinline__ void store_parts(uint32_t *unit_words, const float v[4], float factor, int lane)
{
    const int half = lane >> 1 & 1, q = lane & 1;
    __half high[4], low[4];

#pragma unroll
    for (int e = 0; e < 4; e++)
        split_half(v[e] * factor, &high[e], &low[e]);
    unit_words[q * 4 + half] = half2_bits(__halves2half2(high[0], high[2]));
    unit_words[(q + 2) * 4 + half] = half2_bits(__halves2half2(high[1], high[3]));
    unit_words[q * 4 + 2 + half] = half2_bits(__halves2half2(low[0], low[2]));
    unit_words[(q + 2) * 4 + 2 + half] = half2_bits(__halves2half2(low[1], low[3]));
}

/* A block a slot; the row is read and transformed twice, for its largest number first. */
static __global__ void __launch_bounds__(ROTATE_WARPS *X3_WARP) rotate(const __grid_constant__ rotate_args a)
{
    __shared__ uint32_t largest;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, slot = a.first_slot + blockIdx.x;
    const int e = expert_of(a.slots, slot);
    uint32_t mine = 0;
    float v[4];

    if (e < 0 || a.experts[e].d_suh == NULL)
        return;
    const uint16_t *suh = a.experts[e].d_suh;
    const size_t row = (size_t)(a.slots.d_rows != NULL ? a.slots.d_rows[slot] : slot) * a.slots.ldx;
    if (threadIdx.x == 0)
        largest = 0;
    __syncthreads();
    for (int b = warp; b < a.n_blocks; b += ROTATE_WARPS) {
        load_4(v, a.slots.d_x, X3_CUDA_F32, row, (size_t)b * 128 + 4 * lane, (size_t)a.n_in, a.whole);
        scale_4(v, suh, (size_t)b * 128 + 4 * lane);
        hadamard_128(v, lane);
#pragma unroll
        for (int i = 0; i < 4; i++)
            mine = max(mine, __float_as_uint(v[i]) & 0x7FFFFFFFu);
    }
    atomicMax(&largest, __reduce_max_sync(X3_ALL_LANES, mine));
    __syncthreads();
    const float factor = half_factor(largest);
    for (int b = warp; b < a.n_blocks; b += ROTATE_WARPS) {
        load_4(v, a.slots.d_x, X3_CUDA_F32, row, (size_t)b * 128 + 4 * lane, (size_t)a.n_in, a.whole);
        scale_4(v, suh, (size_t)b * 128 + 4 * lane);
        hadamard_128(v, lane);
        store_parts(a.parts + ((size_t)blockIdx.x * a.n_blocks * 8 + b * 8 + (lane >> 2)) * 16, v, factor, lane);
    }
    if (threadIdx.x == 0)
        a.unit[blockIdx.x] = half_unit(factor);
}

size_t x3_cuda_rotated_bytes(size_t n_in_padded)
{
    return n_in_padded / X3_TILE * 4 * 16;
}

x3_status x3_cuda_expert_rotate(const x3_cuda_slots *slots, const x3_cuda_expert *d_experts, size_t n_in, size_t n_in_padded,
                                const x3_cuda_rotated *to, x3_cuda_stream stream, x3_err *err)
{
    rotate_args a = {};

    if (to->n_slots == 0)
        return X3_OK;
    a.slots = *slots;
    a.experts = d_experts;
    a.n_in = (int)n_in;
    a.n_blocks = (int)(n_in_padded / X3_HADAMARD);
    a.first_slot = (int)to->first_slot;
    a.parts = (uint32_t *)to->d_parts;
    a.unit = to->d_unit;
    a.whole = (uintptr_t)slots->d_x % 16 == 0 && slots->ldx % 4 == 0;
    rotate<<<(unsigned)to->n_slots, ROTATE_WARPS * X3_WARP, 0, stream>>>(a);
    return x3_cuda_check(cudaGetLastError(), "experts, rotating inputs", err);
}

static x3_status check_shape(const x3_cuda_shape *shape, x3_err *err)
{
    if (shape->K < 1 || shape->K > X3_K_MAX)
        return x3_fail(err, X3_ERR_UNSUPPORTED, "K is %d; 1 to %d are known", shape->K, X3_K_MAX);
    if ((unsigned)shape->codebook > X3_CB_MUL1)
        return x3_fail(err, X3_ERR_INPUT, "codebook %d is not one of the three", (int)shape->codebook);
    if (shape->n_in_padded % X3_HADAMARD != 0 || shape->n_out_padded % X3_HADAMARD != 0)
        return x3_fail(err, X3_ERR_INPUT, "EXL3 group of %zu x %zu: both must be multiples of %d", shape->n_in_padded,
                       shape->n_out_padded, X3_HADAMARD);
    return X3_OK;
}

x3_status x3_cuda_expert_exl3(const x3_cuda_info *info, const x3_cuda_slots *slots, const x3_cuda_expert *d_experts,
                              const int32_t *d_list, size_t n_list, const x3_cuda_shape *shape, const x3_cuda_rotated *rows,
                              x3_cuda_stream stream, x3_err *err)
{
    const expert_shape s = rows->n_slots <= 4 * slots->n_experts ? EXPERT_FEW : EXPERT_MANY;
    const size_t at_once = EXPERT_ROWS(s), most = (rows->n_slots + at_once - 1) / at_once;
    expert_args a = {};

    RETURN_IF_FAILED(check_shape(shape, err));
    if (n_list == 0 || rows->n_slots == 0)
        return X3_OK;
    a.experts = d_experts;
    a.list = d_list;
    a.first = slots->d_first;
    a.parts = rows->d_parts;
    a.unit = rows->d_unit;
    a.first_slot = (int)rows->first_slot;
    a.end_slot = (int)(rows->first_slot + rows->n_slots);
    a.n_list = (int)n_list;
    a.n_units = (int)(shape->n_in_padded / X3_TILE);
    a.n_stripes = (int)(shape->n_out_padded / EXPERT_OUTS);
    a.n_out = (int)shape->n_out;
    a.multiplier = multiplier_of(shape->codebook);
    a.addend = addend_of(shape->codebook);
    a.y = slots->d_y;
    a.ldy = slots->ldy;
    a.reverse = slots->reverse;
    a.y_whole = (uintptr_t)slots->d_y % 16 == 0 && slots->ldy % 4 == 0;
    /* blocks that share an expert's rows: enough for twice the mean; more rows are walked through */
    const size_t mean = (2 * rows->n_slots + n_list * at_once - 1) / (n_list * at_once);
    const dim3 grid((unsigned)a.n_stripes, (unsigned)x3_min_size(n_list, rows->n_slots), (unsigned)x3_max_size(1, x3_min_size(most, mean)));
    void *args[] = {&a};
    return x3_cuda_launch(info, x3_expert_kernel(shape->codebook, s), grid, EXPERT_THREADS, expert_shared_bytes(shape->K, s), false,
                          stream, args, "experts", err);
}
