/* cuBLAS and cuSOLVER, found when a CUDA device is opened and not before: a program built with CUDA starts on a machine
 * that has neither. Each function here has the library's name and forwards to it. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "runtime/device/device_cuda.h"

#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)
#define BLAS_FILE "libcublas.so." TEXT(CUBLAS_VER_MAJOR)
#define SOLVER_FILE "libcusolver.so." TEXT(CUSOLVER_VER_MAJOR)

/* result, name, parameters, arguments, result when the library is missing */
#define BLAS_FUNCTIONS(F)                                                                                                     \
    F(cublasStatus_t, cublasCreate_v2, (cublasHandle_t * handle), (handle), CUBLAS_STATUS_NOT_INITIALIZED)                    \
    F(cublasStatus_t, cublasDestroy_v2, (cublasHandle_t handle), (handle), CUBLAS_STATUS_NOT_INITIALIZED)                     \
    F(cublasStatus_t, cublasSetStream_v2, (cublasHandle_t handle, cudaStream_t stream), (handle, stream),                     \
      CUBLAS_STATUS_NOT_INITIALIZED)                                                                                          \
    F(cublasStatus_t, cublasSetWorkspace_v2, (cublasHandle_t handle, void *workspace, size_t n_bytes),                        \
      (handle, workspace, n_bytes), CUBLAS_STATUS_NOT_INITIALIZED)                                                            \
    F(cublasStatus_t, cublasGetVersion_v2, (cublasHandle_t handle, int *version), (handle, version),                          \
      CUBLAS_STATUS_NOT_INITIALIZED)                                                                                          \
    F(const char *, cublasGetStatusString, (cublasStatus_t status), (status), "the library is not loaded")                    \
    F(cublasStatus_t, cublasSgemm_v2,                                                                                         \
      (cublasHandle_t handle, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k, const float *alpha,            \
       const float *a, int lda, const float *b, int ldb, const float *beta, float *c, int ldc),                               \
      (handle, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc), CUBLAS_STATUS_NOT_INITIALIZED)                          \
    F(cublasStatus_t, cublasGemmEx,                                                                                           \
      (cublasHandle_t handle, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k, const void *alpha,             \
       const void *a, cudaDataType type_a, int lda, const void *b, cudaDataType type_b, int ldb, const void *beta, void *c,   \
       cudaDataType type_c, int ldc, cublasComputeType_t compute, cublasGemmAlgo_t algorithm),                                \
      (handle, ta, tb, m, n, k, alpha, a, type_a, lda, b, type_b, ldb, beta, c, type_c, ldc, compute, algorithm),             \
      CUBLAS_STATUS_NOT_INITIALIZED)
#define SOLVER_FUNCTIONS(F)                                                                                                   \
    F(cusolverStatus_t, cusolverDnCreate, (cusolverDnHandle_t * handle), (handle), CUSOLVER_STATUS_NOT_INITIALIZED)           \
    F(cusolverStatus_t, cusolverDnDestroy, (cusolverDnHandle_t handle), (handle), CUSOLVER_STATUS_NOT_INITIALIZED)            \
    F(cusolverStatus_t, cusolverDnSetStream, (cusolverDnHandle_t handle, cudaStream_t stream), (handle, stream),              \
      CUSOLVER_STATUS_NOT_INITIALIZED)                                                                                        \
    F(cusolverStatus_t, cusolverDnDpotrf_bufferSize,                                                                          \
      (cusolverDnHandle_t handle, cublasFillMode_t uplo, int n, double *a, int lda, int *n_work),                             \
      (handle, uplo, n, a, lda, n_work), CUSOLVER_STATUS_NOT_INITIALIZED)                                                     \
    F(cusolverStatus_t, cusolverDnDpotrf,                                                                                     \
      (cusolverDnHandle_t handle, cublasFillMode_t uplo, int n, double *a, int lda, double *work, int n_work, int *info),     \
      (handle, uplo, n, a, lda, work, n_work, info), CUSOLVER_STATUS_NOT_INITIALIZED)                                         \
    F(cusolverStatus_t, cusolverDnDpotrs,                                                                                     \
      (cusolverDnHandle_t handle, cublasFillMode_t uplo, int n, int n_right, const double *a, int lda, double *b, int ldb,    \
       int *info),                                                                                                            \
      (handle, uplo, n, n_right, a, lda, b, ldb, info), CUSOLVER_STATUS_NOT_INITIALIZED)

#define MEMBER(result, name, parameters, arguments, missing) result(*name) parameters;
static struct {
    BLAS_FUNCTIONS(MEMBER)
    SOLVER_FUNCTIONS(MEMBER)
} library;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static char problem[512];

/* By the loader's own search, then where the toolkit installs itself. */
static void *open_library(const char *file)
{
    char path[128];
    void *handle = dlopen(file, RTLD_NOW | RTLD_LOCAL);

    if (handle != NULL)
        return handle;
    snprintf(problem, sizeof problem, "%.480s", dlerror());
    snprintf(path, sizeof path, "/usr/local/cuda/lib64/%s", file);
    handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (handle != NULL)
        problem[0] = '\0';
    return handle;
}

/* Sets the function pointer at `out`. */
static void find(void *handle, const char *name, void *out)
{
    void *f = dlsym(handle, name);

    memcpy(out, &f, sizeof f);
    if (f == NULL && problem[0] == '\0')
        snprintf(problem, sizeof problem, "function %s is missing in the library", name);
}

static void load(void)
{
    void *blas = open_library(BLAS_FILE), *solver = blas == NULL ? NULL : open_library(SOLVER_FILE);

#define FROM_BLAS(result, name, parameters, arguments, missing) find(blas, #name, &library.name);
#define FROM_SOLVER(result, name, parameters, arguments, missing) find(solver, #name, &library.name);
    if (blas == NULL || solver == NULL)
        return;
    BLAS_FUNCTIONS(FROM_BLAS)
    SOLVER_FUNCTIONS(FROM_SOLVER)
}

x3_status x3_cuda_libraries_load(x3_err *err)
{
    pthread_once(&once, load);
    if (problem[0] != '\0')
        return x3_fail(err, X3_ERR_DEVICE, "CUDA: %s and %s are needed: %s", BLAS_FILE, SOLVER_FILE, problem);
    return X3_OK;
}

#define FORWARD(result, name, parameters, arguments, missing) \
    result name parameters                                    \
    {                                                         \
        pthread_once(&once, load);                            \
        return library.name == NULL ? missing : library.name arguments; \
    }
BLAS_FUNCTIONS(FORWARD)
SOLVER_FUNCTIONS(FORWARD)
