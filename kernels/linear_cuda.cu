/* Host side of the EXL3 linear for 1 .. 128 rows and of reconstruction, and what all CUDA launches share. */
#include "kernels/linear_cuda.cuh"

#include <limits.h>
#include <stdio.h>
#include <string.h>

/* ---- devices and launches ------------------------------------------------------------------------------------------ */

x3_status x3_cuda_check(cudaError_t error, const char *what, x3_err *err)
{
    if (error == cudaSuccess)
        return X3_OK;
    return x3_fail(err, error == cudaErrorMemoryAllocation ? X3_ERR_MEMORY : X3_ERR_DEVICE, "CUDA: %s: %s (%s)", what,
                   cudaGetErrorString(error), cudaGetErrorName(error));
}

x3_status x3_cuda_count(int *n, x3_err *err)
{
    cudaError_t error = cudaGetDeviceCount(n);

    if (error == cudaErrorNoDevice || error == cudaErrorInsufficientDriver) {
        *n = 0;
        (void)cudaGetLastError();
        return X3_OK;
    }
    return x3_cuda_check(error, "counting devices", err);
}

x3_status x3_cuda_open(int device, x3_cuda_info *out, x3_err *err)
{
    cudaDeviceProp p;

    memset(out, 0, sizeof *out);
    RETURN_IF_FAILED(x3_cuda_check(cudaSetDevice(device), "choosing the device", err));
    RETURN_IF_FAILED(x3_cuda_check(cudaGetDeviceProperties(&p, device), "reading device properties", err));
    if (p.major < 8)
        return x3_fail(err, X3_ERR_UNSUPPORTED, "%s has compute capability %d.%d; 8.0 is the least", p.name, p.major, p.minor);
    out->device = device;
    out->compute_capability = 10 * p.major + p.minor;
    out->n_multiprocessors = p.multiProcessorCount;
    out->shared_bytes = p.sharedMemPerBlockOptin;
    out->memory_bytes = p.totalGlobalMem;
    snprintf(out->name, sizeof out->name, "%.90s", p.name);
    return X3_OK;
}

x3_status x3_cuda_launch(const x3_cuda_info *info, const void *kernel, dim3 grid, int n_threads, size_t shared_bytes,
                         bool overlap, x3_cuda_stream stream, void **args, const char *what, x3_err *err)
{
    cudaLaunchAttribute attribute = {};
    cudaLaunchConfig_t config = {};

    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = grid;
    config.blockDim = dim3((unsigned)n_threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = overlap && info->compute_capability >= 90 ? 1 : 0;
    if (shared_bytes > 0)
        RETURN_IF_FAILED(x3_cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                           (int)shared_bytes), what, err));
    return x3_cuda_check(cudaLaunchKernelExC(&config, kernel, args), what, err);
}

x3_status x3_cuda_launch_in_turn(const void *kernel, dim3 grid, int n_threads, size_t shared_bytes, x3_cuda_stream stream, void **args,
                                 const char *what, x3_err *err)
{
    x3_cuda_info info = {};
    int major = 0;

    RETURN_IF_FAILED(x3_cuda_check(cudaGetDevice(&info.device), what, err));
    RETURN_IF_FAILED(x3_cuda_check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, info.device), what, err));
    info.compute_capability = 10 * major;
    return x3_cuda_launch(&info, kernel, grid, n_threads, shared_bytes, true, stream, args, what, err);
}

x3_status x3_linear_kernels_of(int K, linear_kernels *out, x3_err *err)
{
    static void (*const fill[])(linear_kernels *) = {
        x3_linear_kernels_k1, x3_linear_kernels_k2, x3_linear_kernels_k3, x3_linear_kernels_k4,
        x3_linear_kernels_k5, x3_linear_kernels_k6, x3_linear_kernels_k7, x3_linear_kernels_k8,
    };

    if (K < 1 || K > X3_K_MAX)
        return x3_fail(err, X3_ERR_UNSUPPORTED, "K is %d; 1 to %d are known", K, X3_K_MAX);
    fill[K - 1](out);
    return X3_OK;
}

/* ---- rotated inputs as operands -------------------------------------------------------------------------------------- */

#define ROTATE_WARPS 16

/* Block (b, r, p): 128 inputs of 16 rows, a warp a row, to the fragments of part p, rows 16 r .., pairs 4 b ... Rows past the end become
 * zero. */
static __global__ void __launch_bounds__(ROTATE_WARPS *X3_WARP) rotate_fragments(const __grid_constant__ linear_args a)
{
    __shared__ __align__(16) uint32_t fragments[8 * X3_WARP * 4]; /* as in linear_args, of this block */
    const int lane = threadIdx.x & 31, r = threadIdx.x >> 5, row = blockIdx.y * 16 + r, part = blockIdx.z, places = linear_row_places(a);
    uint32_t words[2];
    float v[4] = {};

    release_next_kernel();
    wait_for_previous_kernel();
    if (row < a.n_rows) {
        load_inputs(a, row, blockIdx.x, lane, v);
        rotate_loaded(v, load_scales(a, part, blockIdx.x, lane), lane);
    }
    operand_words(v, words);
    for (int i = 0; i < 2; i++) {
        const int word = operand_word(lane, i), q = word / 2, high = word % 2;
        const int at = 4 * (r & 7) + q, unit = lane >> 2;
        fragments[a.n_together == 1 ? (unit * X3_WARP + at) * 4 + 2 * (r >> 3) + high
                                    : unit / 2 * 256 + (r >> 3) * 128 + unit % 2 * 64 + high * 32 + at] = words[i];
    }
    __syncthreads();
    if (threadIdx.x < 8 * X3_WARP) {
        const int n = a.n_together, group = part * ((places / 16 + n - 1) / n) * n + (int)blockIdx.y;
        const size_t pair = (size_t)(group / n) * a.n_pairs_in + blockIdx.x * 4 + threadIdx.x / (2 * X3_WARP);
        a.fragments[(pair * n + group % n) * 2 * X3_WARP + threadIdx.x % (2 * X3_WARP)] = ((const uint4 *)fragments)[threadIdx.x];
    }
}

/* ---- the linear ---------------------------------------------------------------------------------------------------- */

/* How many blocks share the pairs: as many as there are multiprocessors, or up to a tenth less when the cut then falls on
 * stripe borders, since every further segment costs a block about 4 pairs of time. Never fewer pairs than chains. */
static int choose_blocks(const x3_cuda_info *info, int n_pairs_in, int n_stripes)
{
    const int64_t n_pairs = (int64_t)n_pairs_in * n_stripes;
    const int most = x3_max_size(1, (size_t)(n_pairs / N_CHAINS < info->n_multiprocessors ? n_pairs / N_CHAINS : info->n_multiprocessors));
    int best = most;
    int64_t best_cost = INT64_MAX;

    for (int n = most; n > 0 && n >= most * 9 / 10; n--) {
        const int64_t pairs = (n_pairs + n - 1) / n;
        const bool on_borders = n_pairs % n == 0 && (n_stripes % n == 0 || n % n_stripes == 0);
        const int64_t segments = on_borders ? (n_stripes + n - 1) / n : (pairs + n_pairs_in - 1) / n_pairs_in + 1;
        const int64_t cost = (int64_t)x3_round_up((size_t)pairs, N_CHAINS) + 4 * segments;
        if (cost < best_cost) {
            best_cost = cost;
            best = n;
        }
    }
    return best;
}

static bool aligned_for(const void *p, size_t ld, x3_cuda_type type)
{
    return (uintptr_t)p % (type == X3_CUDA_F32 ? 16 : 8) == 0 && ld % 4 == 0;
}

#define COUNTERS_BYTES 65536
static_assert(COUNTERS_BYTES + FOLD_BLOCKS * FOLD_ROWS * STRIPE_COLS * sizeof(uint64_t) == X3_CUDA_COUNTER_BYTES, "counters and slots");

#define MOST_ROWS_OF_A_BLOCK 64 /* a block reads the operands of as many, whatever there are */

size_t x3_linear_fragment_bytes(const x3_cuda_group *g, size_t n_groups, size_t n_rows, int n_together)
{
    return (n_groups * x3_round_up(n_rows, 16 * (size_t)n_together) + MOST_ROWS_OF_A_BLOCK) * g->n_in_padded * 2;
}

static size_t n_stripes_of(const x3_cuda_group *g, size_t n_groups)
{
    size_t n = 0;

    for (size_t i = 0; i < n_groups; i++)
        n += g[i].n_out_padded / STRIPE_COLS;
    return n;
}

size_t x3_cuda_linear_bytes(const x3_cuda_info *info, const x3_cuda_group *g, size_t n_groups, size_t n_rows)
{
    const size_t slots = (size_t)info->n_multiprocessors + n_stripes_of(g, n_groups);

    return X3_CUDA_COUNTER_BYTES + x3_linear_fragment_bytes(g, n_groups, n_rows, 1) +
           slots * n_rows * STRIPE_COLS * sizeof(float);
}

static x3_status check_group(const x3_cuda_group *g, x3_err *err)
{
    if (g->n_in_padded % X3_HADAMARD != 0 || g->n_out_padded % X3_HADAMARD != 0 || g->n_in_padded == 0 ||
        g->n_out_padded == 0)
        return x3_fail(err, X3_ERR_INPUT, "EXL3 group of %zu x %zu: both must be multiples of %d", g->n_in_padded,
                       g->n_out_padded, X3_HADAMARD);
    if (g->n_in > g->n_in_padded || g->n_out > g->n_out_padded)
        return x3_fail(err, X3_ERR_INPUT, "EXL3 group holds %zu x %zu, fewer than the layer's %zu x %zu", g->n_in_padded,
                       g->n_out_padded, g->n_in, g->n_out);
    if ((unsigned)g->codebook > X3_CB_MUL1)
        return x3_fail(err, X3_ERR_INPUT, "codebook %d is not one of the three", (int)g->codebook);
    return X3_OK;
}

x3_status x3_linear_check(const x3_cuda_group *g, size_t n_groups, x3_err *err)
{
    if (n_groups == 0 || n_groups > X3_CUDA_LINEAR_PARTS)
        return x3_fail(err, X3_ERR_INPUT, "%zu weights in one product: 1 to %d", n_groups, X3_CUDA_LINEAR_PARTS);
    for (size_t i = 0; i < n_groups; i++) {
        RETURN_IF_FAILED(check_group(&g[i], err));
        if (g[i].K != g[0].K || g[i].codebook != g[0].codebook || g[i].n_in != g[0].n_in || g[i].n_in_padded != g[0].n_in_padded)
            return x3_fail(err, X3_ERR_INPUT, "weights of one product: K %d and %d, codebooks %d and %d, %zu and %zu inputs", g[0].K,
                           g[i].K, (int)g[0].codebook, (int)g[i].codebook, g[0].n_in, g[i].n_in);
    }
    return X3_OK;
}

void x3_linear_fill_args(linear_args *a, const x3_cuda_group *g, const x3_cuda_rows *rows, size_t n_groups)
{
    memset(a, 0, sizeof *a);
    for (size_t i = 0; i < n_groups; i++) {
        linear_part *p = &a->parts[i];
        p->words = g[i].d_words;
        p->suh = g[i].d_suh;
        p->svh = g[i].d_svh;
        p->bias = g[i].d_bias;
        p->y = rows[i].d_y;
        p->ldy = rows[i].ldy;
        p->y_whole = aligned_for(rows[i].d_y, rows[i].ldy, rows[i].y_type);
        p->n_out = (int)g[i].n_out;
        a->first_stripe[i] = a->n_stripes;
        p->n_stripes = (int)(g[i].n_out_padded / STRIPE_COLS);
        a->n_stripes += p->n_stripes;
    }
    a->n_parts = (int)n_groups;
    for (size_t i = n_groups; i < X3_CUDA_LINEAR_PARTS; i++)
        a->first_stripe[i] = INT_MAX;
    a->n_together = 1;
    a->x = rows->d_x;
    a->up = rows->d_up;
    a->ldx = rows->ldx;
    a->x_type = rows->x_type;
    a->y_type = rows->y_type;
    a->x_whole = aligned_for(rows->d_x, rows->ldx, rows->x_type) && (a->up == NULL || aligned_for(a->up, rows->ldx, rows->x_type));
    a->multiplier = multiplier_of(g->codebook);
    a->addend = addend_of(g->codebook);
    a->n_rows = (int)rows->n_rows;
    a->n_in = (int)g->n_in;
    a->n_pairs_in = (int)(g->n_in_padded / PAIR_INPUTS);
}

static divider divider_of(int by)
{
    divider d = {};

    while ((int64_t)2 << d.shift < by)
        d.shift++;
    d.multiplier = (uint32_t)(((uint64_t)1 << (32 + d.shift)) / (uint64_t)by) + 1;
    return d;
}

int x3_linear_cut(const x3_cuda_info *info, linear_args *a)
{
    const int n_blocks = choose_blocks(info, a->n_pairs_in, a->n_stripes), n_pairs = a->n_pairs_in * a->n_stripes;

    a->n_pairs_each = n_pairs / n_blocks;
    a->n_pairs_more = n_pairs % n_blocks;
    a->by_pairs_in = divider_of(a->n_pairs_in);
    a->by_pairs_each = divider_of(a->n_pairs_each);
    a->by_pairs_each_1 = divider_of(a->n_pairs_each + 1);
    return n_blocks;
}

x3_status x3_linear_rotate(const x3_cuda_info *info, linear_args *a, bool overlap, x3_cuda_stream stream, x3_err *err)
{
    const dim3 grid((unsigned)(a->n_pairs_in / 4), (unsigned)((a->n_rows + 15) / 16), (unsigned)a->n_parts);
    void *args[] = {a};

    return x3_cuda_launch(info, (const void *)rotate_fragments, grid, ROTATE_WARPS * X3_WARP, 0, overlap, stream, args, "linear, rotating inputs", err);
}

/* Sets n_stages and the shared memory of a block; false when the shape does not fit. */
static bool fit(const x3_cuda_info *info, int K, linear_shape shape, linear_args *a, size_t *shared_bytes)
{
    const size_t most_pairs = (size_t)(a->n_pairs_each + (a->n_pairs_more > 0));
    const size_t rest = linear_sums_bytes(shape, a->n_rows) +
                        (shape == LINEAR_FOLDED ? (most_pairs * (size_t)a->n_rows + 1) * LINEAR_PAIR_WORDS * sizeof(uint32_t) : 0);

    for (a->n_stages = 4; a->n_stages >= 2; a->n_stages--) {
        *shared_bytes = linear_ring_bytes(K, shape, a->n_stages) + rest;
        if (*shared_bytes + 64 <= info->shared_bytes) /* 64: what the kernel declares itself */
            return true;
    }
    return false;
}

x3_status x3_cuda_linears(const x3_cuda_info *info, const x3_cuda_group *g, const x3_cuda_rows *rows, size_t n_groups, bool overlap,
                          void *d_scratch, x3_cuda_stream stream, x3_err *err)
{
    const size_t n_rows = rows->n_rows;
    linear_kernels kernels;
    linear_args a;
    size_t shared_bytes = 0;

    RETURN_IF_FAILED(x3_linear_check(g, n_groups, err));
    RETURN_IF_FAILED(x3_linear_kernels_of(g->K, &kernels, err));
    if (n_rows == 0 || n_rows > X3_CUDA_LINEAR_ROWS)
        return x3_fail(err, X3_ERR_INPUT, "linear of %zu rows: 1 to %d at a time", n_rows, X3_CUDA_LINEAR_ROWS);
    x3_linear_fill_args(&a, g, rows, n_groups);
    if ((size_t)a.n_stripes * 2 * sizeof(int) > COUNTERS_BYTES)
        return x3_fail(err, X3_ERR_UNSUPPORTED, "linear with %zu outputs: %d at most", (size_t)a.n_stripes * STRIPE_COLS,
                       COUNTERS_BYTES / 8 * STRIPE_COLS);
    a.counters = (int *)d_scratch;
    a.slots = (uint64_t *)((char *)d_scratch + COUNTERS_BYTES);
    a.fragments = (uint4 *)((char *)d_scratch + X3_CUDA_COUNTER_BYTES);
    a.partial = (float *)((char *)a.fragments + x3_linear_fragment_bytes(g, n_groups, n_rows, 1));

    linear_shape shape = n_rows <= FOLD_ROWS ? LINEAR_FOLDED : n_rows <= 16 ? LINEAR_16 : n_rows <= 32 ? LINEAR_32 : LINEAR_64;
    const int n_blocks = x3_linear_cut(info, &a);
    if (shape == LINEAR_FOLDED && (n_blocks > FOLD_BLOCKS || !fit(info, g->K, shape, &a, &shared_bytes)))
        shape = LINEAR_16;
    if (shape != LINEAR_FOLDED && !fit(info, g->K, shape, &a, &shared_bytes))
        return x3_fail(err, X3_ERR_UNSUPPORTED, "linear at K = %d does not fit into %zu bytes of shared memory", g->K,
                       info->shared_bytes);
    void *args[] = {&a};
    if (shape != LINEAR_FOLDED) {
        RETURN_IF_FAILED(x3_linear_rotate(info, &a, overlap, stream, err));
        overlap = true; /* the weights were there before the kernel just queued */
    }
    const dim3 grid((unsigned)n_blocks, (unsigned)((a.n_rows + 8 * LINEAR_GROUPS(shape) - 1) / (8 * LINEAR_GROUPS(shape))));
    return x3_cuda_launch(info, kernels.linear[decoder_of(g->codebook)][shape], grid, LINEAR_WARPS(shape) * X3_WARP, shared_bytes, overlap,
                        stream, args, "linear", err);
}

x3_status x3_cuda_linear(const x3_cuda_info *info, const x3_cuda_group *g, const x3_cuda_rows *rows, bool overlap, void *d_scratch,
                         x3_cuda_stream stream, x3_err *err)
{
    return x3_cuda_linears(info, g, rows, 1, overlap, d_scratch, stream, err);
}

/* ---- the weight as a matrix ------------------------------------------------------------------------------------------ */

#define MATRIX_WARPS 8

/* Words of two pieces a warp wait in shared memory. */
static x3_status launch_matrix(const x3_cuda_info *info, const x3_cuda_group *g, const void *kernel, int n_pieces, int most,
                               x3_cuda_stream stream, void **args, const char *what, x3_err *err)
{
    const size_t shared_bytes = (size_t)MATRIX_WARPS * 2 * STRIPE_TILES * 32 * (size_t)g->K;

    return x3_cuda_launch(info, kernel, dim3((unsigned)(n_pieces < most ? n_pieces : most)), MATRIX_WARPS * X3_WARP,
                          shared_bytes, false, stream, args, what, err);
}

x3_status x3_cuda_reconstruct(const x3_cuda_info *info, const x3_cuda_group *g, void *d_out, x3_cuda_type type,
                              x3_cuda_stream stream, x3_err *err)
{
    linear_kernels kernels;
    int n_units = (int)(g->n_in_padded / X3_TILE), n_stripes = (int)(g->n_out_padded / STRIPE_COLS);
    uint32_t multiplier = multiplier_of(g->codebook), addend = addend_of(g->codebook);
    void *args[] = {(void *)&g->d_words, &d_out, &n_units, &n_stripes, &multiplier, &addend};

    RETURN_IF_FAILED(x3_linear_check(g, 1, err));
    RETURN_IF_FAILED(x3_linear_kernels_of(g->K, &kernels, err));
    return launch_matrix(info, g, kernels.reconstruct[decoder_of(g->codebook)][type], n_units / STRIPE_TILES * n_stripes,
                         4 * info->n_multiprocessors, stream, args, "reconstruct", err);
}

x3_status x3_cuda_dense(const x3_cuda_info *info, const x3_cuda_group *g, void *d_out, x3_cuda_stream stream, x3_err *err)
{
    linear_kernels kernels;
    int n_units = (int)(g->n_in_padded / X3_TILE), n_stripes = (int)(g->n_out_padded / STRIPE_COLS);
    uint32_t multiplier = multiplier_of(g->codebook), addend = addend_of(g->codebook);
    void *args[] = {(void *)&g->d_words, (void *)&g->d_suh, (void *)&g->d_svh, &d_out, &n_units, &n_stripes, &multiplier, &addend};

    RETURN_IF_FAILED(x3_linear_check(g, 1, err));
    RETURN_IF_FAILED(x3_linear_kernels_of(g->K, &kernels, err));
    return launch_matrix(info, g, kernels.dense[decoder_of(g->codebook)], n_units / STRIPE_TILES * n_stripes, 2 * info->n_multiprocessors,
                         stream, args, "dense weight", err);
}
