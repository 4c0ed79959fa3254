/* The status page as bytes of the program: server_page.html, put there by the assembler. */
#include "runtime/serve/server_internal.h"

__asm__(".section .rodata\n"
        ".global x3_status_page\n"
        "x3_status_page:\n"
        ".incbin \"runtime/serve/server_page.html\"\n"
        "x3_status_page_end:\n"
        ".byte 0\n"
        ".balign 4\n"
        ".global x3_status_page_bytes\n"
        "x3_status_page_bytes:\n"
        ".long x3_status_page_end - x3_status_page\n"
        ".previous\n");
