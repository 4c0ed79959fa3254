/* Host side of the trellis search on the GPU: which compiled form, how many blocks, whose tiles. */
#include "kernels/search_cuda.cuh"

#include <string.h>

static x3_status kernels_of(int K, search_kernels *out, x3_err *err)
{
    static void (*const fill[])(search_kernels *) = {
        x3_search_kernels_k1, x3_search_kernels_k2, x3_search_kernels_k3, x3_search_kernels_k4,
        x3_search_kernels_k5, x3_search_kernels_k6, x3_search_kernels_k7, x3_search_kernels_k8,
    };

    if (K < 1 || K > X3_K_MAX)
        return x3_fail(err, X3_ERR_UNSUPPORTED, "K is %d; 1 to %d are known", K, X3_K_MAX);
    fill[K - 1](out);
    return X3_OK;
}

/* Stored minima of the tiles of one block, and the minima themselves where shared memory is too small for them. */
static size_t block_floats(const search_kernels *k, const search_variant *v, int K)
{
    const size_t groups = X3_STATES >> K, rows = X3_TILE_WEIGHTS / (size_t)k->segment;

    return (size_t)v->n_tiles * groups * (rows + (v->place == SEARCH_GLOBAL ? 2 : 0));
}

static bool usable(const x3_cuda_info *info, const search_variant *v)
{
    return v->shared_bytes + 8 * 1024 <= info->shared_bytes; /* 8 KB: what the kernel declares itself, and the driver */
}

size_t x3_cuda_search_bytes(const x3_cuda_info *info, int K)
{
    search_kernels k;
    size_t most = 0;

    if (kernels_of(K, &k, NULL) != X3_OK)
        return 0;
    for (int i = 0; i < k.n_variants; i++)
        if (usable(info, &k.variants[i]))
            most = x3_max_size(most, block_floats(&k, &k.variants[i], K));
    return most * sizeof(float) * (size_t)info->n_multiprocessors;
}

/* The form that ends first: more tiles a block share conversions and the wait for the walk back, fewer spread better. */
static const search_variant *choose(const x3_cuda_info *info, const search_kernels *k, int n_tiles)
{
    const search_variant *best = NULL;
    double best_time = 0;

    for (int i = 0; i < k->n_variants; i++) {
        const search_variant *v = &k->variants[i];
        const int a_round = v->n_tiles * info->n_multiprocessors, rounds = (n_tiles + a_round - 1) / a_round;
        const double time = rounds * (3.2 * v->n_tiles + 1.2);
        if (usable(info, v) && (best == NULL || time < best_time)) {
            best = v;
            best_time = time;
        }
    }
    return best;
}

static x3_status launch(const x3_cuda_info *info, int K, search_args *a, void *d_scratch, x3_cuda_stream stream, x3_err *err)
{
    search_kernels k;

    RETURN_IF_FAILED(kernels_of(K, &k, err));
    if ((unsigned)a->codebook > X3_CB_MUL1)
        return x3_fail(err, X3_ERR_INPUT, "codebook %d is not one of the three", a->codebook);
    if (a->n_tiles == 0)
        return X3_OK;
    const search_variant *v = choose(info, &k, a->n_tiles);
    if (v == NULL)
        return x3_fail(err, X3_ERR_UNSUPPORTED, "the search at K = %d does not fit into %zu bytes of shared memory", K,
                       info->shared_bytes);
    const int most = (a->n_tiles + v->n_tiles - 1) / v->n_tiles;
    const int n_blocks = most < info->n_multiprocessors ? most : info->n_multiprocessors;
    a->rows = (float *)d_scratch;
    a->block_floats = block_floats(&k, v, K);
    void *args[] = {a};
    return x3_cuda_launch(info, v->kernel[a->codebook], dim3((unsigned)n_blocks),
                          v->n_threads, v->shared_bytes, false, stream, args, "trellis search", err);
}

x3_status x3_cuda_search(const x3_cuda_info *info, x3_codebook codebook, int K, const float *d_x, size_t n_tiles,
                         uint16_t *d_states, void *d_scratch, x3_cuda_stream stream, x3_err *err)
{
    search_args a;

    if (n_tiles > INT32_MAX / 2)
        return x3_fail(err, X3_ERR_INPUT, "search of %zu tiles: %d at most", n_tiles, INT32_MAX / 2);
    memset(&a, 0, sizeof a);
    a.n_tiles = (int)n_tiles;
    a.codebook = codebook;
    a.x = d_x;
    a.states = d_states;
    return launch(info, K, &a, d_scratch, stream, err);
}

x3_status x3_cuda_search_strips(const x3_cuda_info *info, x3_codebook codebook, int K, const x3_cuda_strip *strips,
                                size_t n_strips, void *d_scratch, x3_cuda_stream stream, x3_err *err)
{
    search_args a;

    if (n_strips == 0 || n_strips > X3_CUDA_STRIPS)
        return x3_fail(err, X3_ERR_INPUT, "search of %zu strips: 1 to %d at a time", n_strips, X3_CUDA_STRIPS);
    memset(&a, 0, sizeof a);
    a.codebook = codebook;
    a.n_strips = (int)n_strips;
    for (size_t i = 0; i < n_strips; i++) {
        if (strips[i].n_out % X3_TILE != 0 || strips[i].n_out > INT32_MAX / 64)
            return x3_fail(err, X3_ERR_INPUT, "strip %zu has %zu columns; a multiple of %d is needed", i, strips[i].n_out, X3_TILE);
        a.strips[i] = strips[i];
        a.first_tile[i + 1] = a.first_tile[i] + (int)(strips[i].n_out / X3_TILE);
    }
    a.n_tiles = a.first_tile[n_strips];
    return launch(info, K, &a, d_scratch, stream, err);
}
