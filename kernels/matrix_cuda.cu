/* Element-wise operations, sums, transposes and Hadamard transforms of matrices on the GPU. */
#include "kernels/cuda_ops.h"
#include "kernels/cuda_common.cuh"

#define THREADS 256

static dim3 grid_of(size_t n)
{
    return dim3((unsigned)((n + THREADS - 1) / THREADS));
}

static __device__ __forceinline__ size_t flat_index(void)
{
    return (size_t)blockIdx.x * THREADS + threadIdx.x;
}

/* ---- element-wise ---------------------------------------------------------------------------------------------------- */

static __global__ void __launch_bounds__(THREADS) add(float *x, const float *y, size_t n)
{
    const size_t i = flat_index();

    begin_in_turn();
    if (i < n)
        x[i] += y[i];
}

static __global__ void __launch_bounds__(THREADS) multiply(float *x, const float *y, size_t n)
{
    const size_t i = flat_index();

    if (i < n)
        x[i] *= y[i];
}

static __global__ void __launch_bounds__(THREADS) scale(float *x, size_t n, float alpha)
{
    const size_t i = flat_index();

    if (i < n)
        x[i] *= alpha;
}

static __global__ void __launch_bounds__(THREADS) axpy(float alpha, const float *x, float *y, size_t n)
{
    const size_t i = flat_index();

    if (i < n)
        y[i] += alpha * x[i];
}

static __global__ void __launch_bounds__(THREADS) add_diagonal(float *a, size_t n, const float *d)
{
    const size_t i = flat_index();

    if (i < n)
        a[i * n + i] += d[i];
}

static __global__ void __launch_bounds__(THREADS) widen(const float *x, size_t n, double *out)
{
    const size_t i = flat_index();

    if (i < n)
        out[i] = x[i];
}

static __global__ void __launch_bounds__(THREADS) narrow(const double *x, size_t n, float *out)
{
    const size_t i = flat_index();

    if (i < n)
        out[i] = (float)x[i];
}

static __global__ void __launch_bounds__(THREADS) scale_matrix(float *x, size_t n, size_t n_cols, const float *s, bool by_row)
{
    const size_t i = flat_index();

    if (i < n)
        x[i] *= s[by_row ? i / n_cols : i % n_cols];
}

#define FLAT(name, kernel, n, ...)                                  \
    if ((n) == 0)                                                   \
        return X3_OK;                                               \
    kernel<<<grid_of(n), THREADS, 0, stream>>>(__VA_ARGS__);        \
    return x3_cuda_check(cudaGetLastError(), name, err)

x3_status x3_cuda_add(float *d_x, const float *d_y, size_t n, x3_cuda_stream stream, x3_err *err)
{
    void *args[] = {&d_x, &d_y, &n};

    return n == 0 ? X3_OK : x3_cuda_launch_in_turn((const void *)add, grid_of(n), THREADS, 0, stream, args, "add", err);
}

x3_status x3_cuda_multiply(float *d_x, const float *d_y, size_t n, x3_cuda_stream stream, x3_err *err)
{
    FLAT("multiply", multiply, n, d_x, d_y, n);
}

x3_status x3_cuda_scale(float *d_x, size_t n, float alpha, x3_cuda_stream stream, x3_err *err)
{
    FLAT("scale", scale, n, d_x, n, alpha);
}

x3_status x3_cuda_axpy(float alpha, const float *d_x, float *d_y, size_t n, x3_cuda_stream stream, x3_err *err)
{
    FLAT("axpy", axpy, n, alpha, d_x, d_y, n);
}

x3_status x3_cuda_add_diagonal(float *d_a, size_t n, const float *d_d, x3_cuda_stream stream, x3_err *err)
{
    FLAT("add_diagonal", add_diagonal, n, d_a, n, d_d);
}

x3_status x3_cuda_widen(const float *d_x, size_t n, double *d_out, x3_cuda_stream stream, x3_err *err)
{
    FLAT("widen", widen, n, d_x, n, d_out);
}

x3_status x3_cuda_narrow(const double *d_x, size_t n, float *d_out, x3_cuda_stream stream, x3_err *err)
{
    FLAT("narrow", narrow, n, d_x, n, d_out);
}

x3_status x3_cuda_scale_matrix(float *d_x, size_t n_rows, size_t n_cols, const float *d_s, bool by_row, x3_cuda_stream stream,
                               x3_err *err)
{
    FLAT("scaling a matrix", scale_matrix, n_rows * n_cols, d_x, n_rows * n_cols, n_cols, d_s, by_row);
}

/* ---- transposes -------------------------------------------------------------------------------------------------------- */

#define SIDE 32

/* out [n_cols_padded rows of n_rows_padded]: out[c][r] = x[r][c], zero outside. */
static __global__ void __launch_bounds__(SIDE * 8) transpose_pad(const float *x, size_t n_rows, size_t n_cols, float *out, size_t ldo,
                                                                 size_t n_out_rows)
{
    __shared__ float tile[SIDE][SIDE + 1];
    const size_t c = (size_t)blockIdx.x * SIDE, r = (size_t)blockIdx.y * SIDE;
    const int tx = threadIdx.x % SIDE, ty = threadIdx.x / SIDE;

    for (int i = ty; i < SIDE; i += 8)
        tile[i][tx] = r + i < n_rows && c + tx < n_cols ? x[(r + i) * n_cols + c + tx] : 0.0f;
    __syncthreads();
    for (int i = ty; i < SIDE; i += 8)
        if (c + i < n_out_rows && r + tx < ldo)
            out[(c + i) * ldo + r + tx] = tile[tx][i];
}

x3_status x3_cuda_transpose_pad(const float *d_w, size_t n_out, size_t n_in, float *d_out, size_t n_out_padded, size_t n_in_padded,
                                x3_cuda_stream stream, x3_err *err)
{
    const size_t y = (n_out_padded + SIDE - 1) / SIDE;

    if (n_out_padded == 0 || n_in_padded == 0)
        return X3_OK;
    if (y > 65535)
        return x3_fail(err, X3_ERR_UNSUPPORTED, "transpose of %zu rows: %d at most", n_out_padded, 65535 * SIDE);
    transpose_pad<<<dim3((unsigned)((n_in_padded + SIDE - 1) / SIDE), (unsigned)y), SIDE * 8, 0, stream>>>(
        d_w, n_out, n_in, d_out, n_out_padded, n_in_padded);
    return x3_cuda_check(cudaGetLastError(), "transpose", err);
}

static __global__ void __launch_bounds__(SIDE * 8) mirror(float *a, size_t n)
{
    __shared__ float tile[SIDE][SIDE + 1];
    const size_t c = (size_t)blockIdx.x * SIDE, r = (size_t)blockIdx.y * SIDE;
    const int tx = threadIdx.x % SIDE, ty = threadIdx.x / SIDE;

    if (c > r)
        return;
    for (int i = ty; i < SIDE; i += 8)
        if (r + i < n && c + tx < n)
            tile[i][tx] = a[(r + i) * n + c + tx];
    __syncthreads();
    for (int i = ty; i < SIDE; i += 8)
        if (r + tx < n && c + i < r + tx)
            a[(c + i) * n + r + tx] = tile[tx][i];
}

x3_status x3_cuda_mirror(float *d_a, size_t n, x3_cuda_stream stream, x3_err *err)
{
    const unsigned tiles = (unsigned)((n + SIDE - 1) / SIDE);

    if (n == 0)
        return X3_OK;
    if (tiles > 65535)
        return x3_fail(err, X3_ERR_UNSUPPORTED, "matrix of %zu: %d at most", n, 65535 * SIDE);
    mirror<<<dim3(tiles, tiles), SIDE * 8, 0, stream>>>(d_a, n);
    return x3_cuda_check(cudaGetLastError(), "mirror", err);
}

/* ---- sums ----------------------------------------------------------------------------------------------------------------- */

static __global__ void __launch_bounds__(THREADS) row_dots(const float *x, const float *y, size_t n_cols, double *out)
{
    __shared__ double room[THREADS / X3_WARP];
    const size_t row = blockIdx.x;
    double sum = 0;

    for (size_t c = threadIdx.x; c < n_cols; c += THREADS)
        sum += (double)x[row * n_cols + c] * (double)y[row * n_cols + c];
    for (int lanes = X3_WARP / 2; lanes > 0; lanes /= 2)
        sum += __shfl_xor_sync(X3_ALL_LANES, sum, lanes);
    if (threadIdx.x % X3_WARP == 0)
        room[threadIdx.x / X3_WARP] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < THREADS / X3_WARP; w++)
            sum += room[w];
        out[row] = sum;
    }
}

x3_status x3_cuda_row_dots(const float *d_x, const float *d_y, size_t n_rows, size_t n_cols, double *d_out, x3_cuda_stream stream,
                           x3_err *err)
{
    if (n_rows == 0)
        return X3_OK;
    row_dots<<<(unsigned)n_rows, THREADS, 0, stream>>>(d_x, d_y, n_cols, d_out);
    return x3_cuda_check(cudaGetLastError(), "sums along rows", err);
}

#define DOT_ROWS 256 /* of a partial sum */

static __global__ void __launch_bounds__(THREADS) col_dots_part(const float *x, const float *y, size_t n_rows, size_t n_cols,
                                                                double *partial)
{
    const size_t c = flat_index(), first = (size_t)blockIdx.y * DOT_ROWS;
    double sum = 0;

    if (c >= n_cols)
        return;
    for (size_t r = first; r < first + DOT_ROWS && r < n_rows; r++)
        sum += (double)x[r * n_cols + c] * (double)y[r * n_cols + c];
    partial[blockIdx.y * n_cols + c] = sum;
}

static __global__ void __launch_bounds__(THREADS) col_dots_add(const double *partial, size_t n_parts, size_t n_cols, double *out)
{
    const size_t c = flat_index();
    double sum = 0;

    if (c >= n_cols)
        return;
    for (size_t i = 0; i < n_parts; i++)
        sum += partial[i * n_cols + c];
    out[c] = sum;
}

size_t x3_cuda_col_dots_bytes(size_t n_rows, size_t n_cols)
{
    return (n_rows + DOT_ROWS - 1) / DOT_ROWS * n_cols * sizeof(double);
}

x3_status x3_cuda_col_dots(const float *d_x, const float *d_y, size_t n_rows, size_t n_cols, double *d_partial, double *d_out,
                           x3_cuda_stream stream, x3_err *err)
{
    const size_t n_parts = (n_rows + DOT_ROWS - 1) / DOT_ROWS;

    if (n_cols == 0)
        return X3_OK;
    if (n_parts > 0)
        col_dots_part<<<dim3(grid_of(n_cols).x, (unsigned)n_parts), THREADS, 0, stream>>>(d_x, d_y, n_rows, n_cols, d_partial);
    col_dots_add<<<grid_of(n_cols), THREADS, 0, stream>>>(d_partial, n_parts, n_cols, d_out);
    return x3_cuda_check(cudaGetLastError(), "sums down columns", err);
}

/* ---- Hadamard ---------------------------------------------------------------------------------------------------------------- */

static __global__ void __launch_bounds__(THREADS) hadamard_rows(float *x, size_t n_blocks)
{
    const size_t block = flat_index() / X3_WARP;
    const int lane = threadIdx.x & 31;

    if (block >= n_blocks)
        return;
    float4 *at = (float4 *)(x + block * X3_HADAMARD) + lane, f = *at;
    float v[4] = {f.x, f.y, f.z, f.w};
    hadamard_128(v, lane);
    *at = make_float4(v[0], v[1], v[2], v[3]);
}

/* A thread a column of a block of 128 rows, all in registers. */
static __global__ void __launch_bounds__(128) hadamard_cols(float *x, size_t n_cols)
{
    const size_t c = (size_t)blockIdx.x * 128 + threadIdx.x;
    float v[X3_HADAMARD];

    if (c >= n_cols)
        return;
    x += (size_t)blockIdx.y * X3_HADAMARD * n_cols + c;
#pragma unroll
    for (int i = 0; i < X3_HADAMARD; i++)
        v[i] = x[i * n_cols];
#pragma unroll
    for (int stride = 1; stride < X3_HADAMARD; stride *= 2)
#pragma unroll
        for (int i = 0; i < X3_HADAMARD; i++)
            if ((i & stride) == 0) {
                const float low = v[i], high = v[i + stride];
                v[i] = low + high;
                v[i + stride] = low - high;
            }
#pragma unroll
    for (int i = 0; i < X3_HADAMARD; i++)
        x[i * n_cols] = v[i] * 0.08838834764831845f;
}

x3_status x3_cuda_hadamard(float *d_x, size_t n_rows, size_t n_cols, bool down, x3_cuda_stream stream, x3_err *err)
{
    const size_t n_blocks = n_rows * n_cols / X3_HADAMARD;

    if (n_blocks == 0)
        return X3_OK;
    if ((down ? n_rows : n_cols) % X3_HADAMARD != 0)
        return x3_fail(err, X3_ERR_INPUT, "Hadamard transform of %zu x %zu: not a multiple of %d", n_rows, n_cols, X3_HADAMARD);
    if (down)
        hadamard_cols<<<dim3((unsigned)((n_cols + 127) / 128), (unsigned)(n_rows / X3_HADAMARD)), 128, 0, stream>>>(d_x, n_cols);
    else
        hadamard_rows<<<grid_of(n_blocks * X3_WARP), THREADS, 0, stream>>>(d_x, n_blocks);
    return x3_cuda_check(cudaGetLastError(), "Hadamard transform", err);
}

/* ---- rows that are not finite ----------------------------------------------------------------------------------------------- */

static __global__ void __launch_bounds__(THREADS) bad_rows(float *x, float *y, size_t n, bool clear, uint32_t *bad)
{
    const size_t row = blockIdx.x;
    int mine = 0;

    for (size_t i = threadIdx.x; i < n; i += THREADS)
        mine |= !isfinite(x[row * n + i]) || (y != NULL && !isfinite(y[row * n + i]));
    if (__syncthreads_or(mine) == 0)
        return;
    for (size_t i = threadIdx.x; i < n && clear; i += THREADS) {
        x[row * n + i] = 0;
        if (y != NULL)
            y[row * n + i] = 0;
    }
    if (threadIdx.x == 0)
        atomicAdd(bad, 1u);
}

x3_status x3_cuda_bad_rows(float *d_x, float *d_y, size_t n_rows, size_t n, bool clear, uint32_t *d_bad, x3_cuda_stream stream,
                           x3_err *err)
{
    if (n_rows == 0)
        return X3_OK;
    bad_rows<<<(unsigned)n_rows, THREADS, 0, stream>>>(d_x, d_y, n, clear, d_bad);
    return x3_cuda_check(cudaGetLastError(), "looking for values that are not finite", err);
}

/* ---- block LDL ------------------------------------------------------------------------------------------------------------------ */

#define LDL_THREADS 64

/* One thread a row and block column: solves l G = g with the 16 x 16 lower diagonal block G. */
static __global__ void __launch_bounds__(LDL_THREADS) block_unit(const double *g, size_t n, float *l)
{
    __shared__ double diagonal[X3_TILE][X3_TILE];
    const size_t at = (size_t)blockIdx.y * X3_TILE, row = (size_t)blockIdx.x * LDL_THREADS + threadIdx.x;
    float out[X3_TILE];

    for (int i = threadIdx.x; i < X3_TILE_WEIGHTS; i += LDL_THREADS)
        diagonal[i / X3_TILE][i % X3_TILE] = g[(at + i / X3_TILE) * n + at + i % X3_TILE];
    __syncthreads();
    if (row >= n)
        return;
    if (row < at + X3_TILE) {
        for (int c = 0; c < X3_TILE; c++)
            out[c] = row == at + c ? 1.0f : 0.0f;
    } else {
        double v[X3_TILE];
#pragma unroll
        for (int c = X3_TILE - 1; c >= 0; c--) {
            double sum = g[row * n + at + c];
#pragma unroll
            for (int k = c + 1; k < X3_TILE; k++)
                sum -= v[k] * diagonal[k][c];
            v[c] = sum / diagonal[c][c];
            out[c] = (float)v[c];
        }
    }
#pragma unroll
    for (int c = 0; c < X3_TILE; c++)
        l[row * n + at + c] = out[c];
}

x3_status x3_cuda_block_unit(const double *d_g, size_t n, float *d_l, x3_cuda_stream stream, x3_err *err)
{
    if (n == 0)
        return X3_OK;
    block_unit<<<dim3((unsigned)((n + LDL_THREADS - 1) / LDL_THREADS), (unsigned)(n / X3_TILE)), LDL_THREADS, 0, stream>>>(d_g, n,
                                                                                                                     d_l);
    return x3_cuda_check(cudaGetLastError(), "block LDL", err);
}
