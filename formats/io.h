/* Files: whole reads and writes at an offset, atomic replacement, mapping, hashing, folders.
 * Every message names the path. Writers sync before they say done. */
#ifndef X3_IO_H
#define X3_IO_H

#include "formats/base.h"

/* A read-only mapping of a whole file; data is NULL for an empty file. */
typedef struct x3_map {
    const unsigned char *data;
    uint64_t n_bytes;
} x3_map;

x3_status x3_map_open(x3_map *map, const char *path, x3_err *err) X3_MUST;
void x3_map_close(x3_map *map);

/* *out = "dir/name" on the heap. */
x3_status x3_path_join(char **out, const char *dir, const char *name, x3_err *err) X3_MUST;
bool x3_path_exists(const char *path);
bool x3_path_is_dir(const char *path);
/* True when both exist and, links resolved, one is the other or lies inside the other. */
bool x3_path_overlaps(const char *a, const char *b);
/* Length of `path` without slashes at its end. */
size_t x3_path_trimmed(const char *path);
/* Creates `path` and its parents. */
x3_status x3_mkdirs(const char *path, x3_err *err) X3_MUST;
/* Removes a folder of plain files and folders; a missing one is fine. */
x3_status x3_remove_tree(const char *path, x3_err *err) X3_MUST;
/* Makes names created, renamed or removed in `dir` durable. */
x3_status x3_sync_dir(const char *dir, x3_err *err) X3_MUST;
x3_status x3_rename(const char *from, const char *to, x3_err *err) X3_MUST;

/* Names in `dir`, sorted bytewise, without "." and ".."; free with x3_names_free. */
typedef struct x3_names {
    char **items;
    size_t n_items, capacity;
} x3_names;

x3_status x3_list_dir(x3_names *names, const char *dir, x3_err *err) X3_MUST;
void x3_names_free(x3_names *names);

/* Whole file as bytes with a NUL after them. Refuses more than max_bytes. */
x3_status x3_read_file(char **out, size_t *n_bytes, const char *path, uint64_t max_bytes, x3_err *err) X3_MUST;
/* Writes `path` through a temporary name, synced, then renamed: readers see the old file or the new one. */
x3_status x3_write_file(const char *path, const void *data, size_t n_bytes, x3_err *err) X3_MUST;
/* Copies bytes (links followed), synced and atomic; *hash, when asked for, is the XXH3 of them. */
x3_status x3_copy_file(const char *from, const char *to, uint64_t *hash, x3_err *err) X3_MUST;
x3_status x3_hash_file(const char *path, uint64_t *hash, x3_err *err) X3_MUST;

/* Exactly n_bytes at offset, retried until done; a short file is an error. */
x3_status x3_pread_all(int fd, void *data, size_t n_bytes, uint64_t offset, const char *path, x3_err *err) X3_MUST;
x3_status x3_pwrite_all(int fd, const void *data, size_t n_bytes, uint64_t offset, const char *path,
                        x3_err *err) X3_MUST;

#endif
