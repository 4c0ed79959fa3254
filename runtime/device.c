#include "runtime/device.h"

#include <stdlib.h>
#include <string.h>

x3_status x3_device_open(x3_device **out, const char *spec, int n_threads, x3_err *err)
{
    *out = NULL;
    if (strcmp(spec, "cpu") == 0)
        return x3_device_open_cpu(out, n_threads, err);
    if (strncmp(spec, "cuda", 4) == 0 && (spec[4] == '\0' || spec[4] == ':'))
        return x3_fail(err, X3_ERR_UNSUPPORTED, "device %s: this version computes on the CPU only", spec);
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
