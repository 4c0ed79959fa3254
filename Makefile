# exl3 toolchain. `make help` lists the targets.
# One build folder a configuration: build/<CONFIG>; CONFIG=release, asan, ubsan, arm64, fuzz.

.DEFAULT_GOAL := all
CONFIG ?= release
B := build/$(CONFIG)
CC ?= gcc
NVCC ?= $(shell command -v nvcc 2>/dev/null || ls /usr/local/cuda/bin/nvcc 2>/dev/null)
DATA ?= ../shared

WARN := -Wall -Wextra -Wpedantic -Wshadow -Wcast-align -Wpointer-arith -Wstrict-prototypes -Wmissing-prototypes \
        -Wvla -Wformat=2 -Wwrite-strings -Wswitch-enum
ifdef CI
WARN += -Werror
endif
OPT := -O2
CFLAGS := -std=c11 -D_GNU_SOURCE -g $(WARN) -ffp-contract=off -pthread -I.
LIBS := -lopenblas -lcjson -lxxhash -lpcre2-8 -lutf8proc -lyaml -lm

SOURCE_ID := $(shell git rev-parse --short=12 HEAD 2>/dev/null || echo unknown)

ifeq ($(CONFIG),asan)
OPT := -O1
CFLAGS += -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
LDFLAGS += -fsanitize=address,undefined
endif
ifeq ($(CONFIG),ubsan)
CC := clang
CFLAGS += -fsanitize=undefined -fno-sanitize-recover=all
LDFLAGS += -fsanitize=undefined
endif

ARCH := $(shell $(CC) -dumpmachine | cut -d- -f1)
ifeq ($(ARCH),x86_64)
ISAS := avx2 avx512
endif
ifeq ($(ARCH),aarch64)
ISAS := neon
endif
ISA_FLAGS_avx2 := -mavx2 -mfma -mf16c
ISA_FLAGS_avx512 := -mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c -mprefer-vector-width=512
ISA_FLAGS_neon :=

FOLDERS := formats kernels runtime calib quant
SIMD_SRC := $(wildcard kernels/*_simd.c)
LIB_SRC := $(filter-out $(SIMD_SRC),$(wildcard $(addsuffix /*.c,$(FOLDERS))))
LIB_OBJ := $(B)/source_id.o $(LIB_SRC:%.c=$(B)/%.o) $(foreach i,$(ISAS),$(SIMD_SRC:%.c=$(B)/%.$(i).o))
TEST_SRC := $(wildcard tests/test_*.c)
TEST_OBJ := $(TEST_SRC:%.c=$(B)/%.o)

.PHONY: help all test
help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## /{printf "  make %-14s %s\n", $$1, $$2}' Makefile

TOOLS := exl3-quantize exl3-eval
all: $(TOOLS:%=$(B)/%) ## build the programs into build/release

$(B)/exl3-%: $(B)/tools/exl3_%.o $(B)/tools/options.o $(B)/tools/progress.o $(LIB_OBJ)
	@echo "LINK $@"; $(CC) $(LDFLAGS) -pthread -o $@ $^ $(LIBS)

# The revision is compiled in; the file changes only when the revision does.
$(shell mkdir -p $(B) && printf 'const char *x3_source_id(void);\nconst char *x3_source_id(void)\n{\n    return "%s";\n}\n' '$(SOURCE_ID)' > $(B)/source_id.new && { cmp -s $(B)/source_id.new $(B)/source_id.c || cp $(B)/source_id.new $(B)/source_id.c; })
$(B)/source_id.o: $(B)/source_id.c
	@$(CC) $(CFLAGS) -c $< -o $@

test: $(B)/tests/tests ## the test suite
	$(B)/tests/tests $(WORDS)

$(B)/tests/tests: $(TEST_OBJ) $(LIB_OBJ)
	@echo "LINK $@"; $(CC) $(LDFLAGS) -pthread -o $@ $^ $(LIBS)

$(B)/%.o: %.c Makefile
	@mkdir -p $(@D)
	@echo "CC $<"; $(CC) $(CFLAGS) $(OPT) -MMD -MP -c $< -o $@

# One source, one object an instruction set; -O3 unrolls the small loops over vectors into registers.
define simd_rule
$(B)/%.$(1).o: %.c Makefile
	@mkdir -p $$(@D)
	@echo "CC $$< ($(1))"; $(CC) $(CFLAGS) -O3 $(ISA_FLAGS_$(1)) -DX3_ISA=$(1) -MMD -MP -c $$< -o $$@
endef
$(foreach i,$(ISAS),$(eval $(call simd_rule,$(i))))

-include $(LIB_OBJ:.o=.d) $(wildcard $(B)/tools/*.d) $(TEST_OBJ:.o=.d)

$(B)/tests/bench_%: $(B)/tests/bench_%.o $(LIB_OBJ)
	@echo "LINK $@"; $(CC) $(LDFLAGS) -pthread -o $@ $^ $(LIBS)

.PRECIOUS: $(B)/tests/bench_%.o
.PHONY: bench-anchor
bench-anchor: $(B)/tests/bench_anchor ## error of single linears beside the peer's (DATA=../shared)
	$(B)/tests/bench_anchor $(DATA)

CONF_SRC := $(wildcard tests/conformance/*.c)
CONF_OBJ := $(CONF_SRC:%.c=$(B)/%.o) $(B)/tests/test_main.o
$(B)/tests/conformance_tests: $(CONF_OBJ) $(LIB_OBJ)
	@echo "LINK $@"; $(CC) $(LDFLAGS) -pthread -o $@ $^ $(LIBS)

.PHONY: conformance
conformance: $(B)/tests/conformance_tests ## checks against the shared material (DATA=../shared)
	$(B)/tests/conformance_tests --data $(DATA) $(WORDS)
