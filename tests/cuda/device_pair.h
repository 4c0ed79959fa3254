/* A CPU and a CUDA device side by side, and arrays that are on both. Tests skip where there is no GPU. */
#ifndef X3_DEVICE_PAIR_H
#define X3_DEVICE_PAIR_H

#include "runtime/device/device.h"

/* Both devices, opened once; skips the test without a GPU. */
typedef struct x3_pair {
    x3_device *cpu, *gpu;
} x3_pair;

x3_pair x3_pair_open(void);
void x3_pair_close(x3_pair *p);

/* n floats on the host (which is the CPU device's memory) and a copy on the GPU. */
typedef struct x3_twin {
    float *cpu, *gpu;
    size_t n;
} x3_twin;

/* Standard normal numbers; the same for the same name. */
x3_twin x3_twin_random(const x3_pair *p, const char *name, size_t n);
/* GPU := CPU. */
void x3_twin_upload(const x3_pair *p, const x3_twin *t);
/* The GPU's numbers, on the heap. */
float *x3_twin_download(const x3_pair *p, const x3_twin *t);
void x3_twin_free(const x3_pair *p, x3_twin *t);

/* Bytes to the GPU; freed with x3_device_free. */
void *x3_pair_upload(const x3_pair *p, const void *from, size_t n_bytes);

/* |a - b| / |b| of the GPU's numbers a and the CPU's b. */
double x3_twin_error(const x3_pair *p, const x3_twin *t);
bool x3_twin_equal(const x3_pair *p, const x3_twin *t);

/* The same weight on both, with a bias. */
typedef struct x3_twin_weight {
    x3_weight cpu, gpu;
    x3_twin bias;
    void *host;
    uint16_t *scales;
} x3_twin_weight;

/* Random values, some of them tiny; n_in and n_out need be multiples of nothing. */
x3_twin_weight x3_twin_dense(const x3_pair *p, x3_weight_kind kind, size_t n_out, size_t n_in);
x3_twin_weight x3_twin_exl3(const x3_pair *p, int K, x3_codebook codebook, size_t n_out, size_t n_in);
void x3_twin_weight_free(const x3_pair *p, x3_twin_weight *w);

/* A tiny random model with experts (tiny_model.h), its first `dense` layers without. */
void x3_test_write_moe(const char *dir, const char *type, size_t dense);
/* Writes root/model, of a type, and quantizes it to a pack whose experts have every K from 1 to 8. */
void x3_test_write_mixed_pack(const char *root, const char *type, const char *pack);

/* Both devices do the same: `op` is a call with `dev` and, by OF, the pointers of one of them. Needs "tests/test.h". */
#define BOTH(p, err, op)                             \
    do {                                             \
        for (int device_ = 0; device_ < 2; device_++) { \
            const bool on_gpu = device_ == 1;        \
            x3_device *dev = on_gpu ? (p).gpu : (p).cpu; \
            CHECK_OK(op, err);                       \
            CHECK_OK(dev->ops->sync(dev, err), err); \
        }                                            \
    } while (0)
#define OF(t) (on_gpu ? (t).gpu : (t).cpu)

#endif
