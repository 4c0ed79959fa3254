#include "runtime/device/device.h"

#include <stdlib.h>
#include <string.h>

const char *x3_work_name(x3_work work)
{
    static const char *const names[X3_N_WORKS] = {"transfer", "linear", "attention", "rows", "moments", "product", "factor",
                                                  "matrix", "encode", "score"};

    return names[work];
}

static x3_status open_cuda(x3_device **out, int index, x3_err *err)
{
#ifdef X3_CUDA
    return x3_device_open_cuda(out, index, err);
#else
    (void)out;
    return x3_fail(err, X3_ERR_UNSUPPORTED, "device cuda:%d: this program was built without CUDA (make cuda builds one with "
                   "it); --device cpu", index);
#endif
}

x3_status x3_device_open(x3_device **out, const char *spec, int n_threads, x3_err *err)
{
    *out = NULL;
    if (strcmp(spec, "cpu") == 0)
        return x3_device_open_cpu(out, n_threads, err);
    if (strcmp(spec, "cuda") == 0)
        return open_cuda(out, 0, err);
    if (strncmp(spec, "cuda:", 5) == 0 && strlen(spec) > 5 && strlen(spec) < 9 && strspn(spec + 5, "0123456789") == strlen(spec + 5))
        return open_cuda(out, atoi(spec + 5), err);
    return x3_fail(err, X3_ERR_INPUT, "device \"%s\" is unknown: cpu or cuda[:N]", spec);
}

void x3_device_close(x3_device *dev)
{
    if (dev != NULL)
        dev->ops->destroy(dev);
}

x3_status x3_device_alloc(x3_device *dev, void *out, size_t n_bytes, x3_err *err)
{
    void *p = NULL;
    x3_status rc = dev->ops->alloc(dev, &p, n_bytes, err);

    memcpy(out, &p, sizeof p);
    return rc;
}

x3_status x3_device_floats(x3_device *dev, float **out, size_t n, x3_err *err)
{
    uint64_t bytes;

    *out = NULL;
    if (x3_mul_overflows(n, sizeof(float), &bytes))
        return x3_fail(err, X3_ERR_MEMORY, "%zu floats are too many", n);
    return x3_device_alloc(dev, out, bytes, err);
}

void x3_device_free(x3_device *dev, void *p)
{
    if (p != NULL)
        dev->ops->free(dev, p);
}

size_t x3_device_in_place(bool integrated, bool pageable_access)
{
    return integrated && pageable_access ? 16 : 0;
}

x3_status x3_device_host_alloc(x3_device *dev, void *out, size_t n_bytes, x3_err *err)
{
    void *p = NULL;
    x3_status rc = dev->ops->host_alloc != NULL ? dev->ops->host_alloc(dev, &p, n_bytes, err) : x3_alloc(&p, n_bytes, 1, err);

    memcpy(out, &p, sizeof p);
    return rc;
}

void x3_device_host_free(x3_device *dev, void *p)
{
    if (p != NULL && dev->ops->host_free != NULL)
        dev->ops->host_free(dev, p);
    else
        free(p);
}
