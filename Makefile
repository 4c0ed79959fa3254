# exl3 toolchain. `make help` lists the targets.
# One build folder a configuration: build/<CONFIG>, CONFIG = release, cuda, asan, ubsan, arm64, fuzz.

.DEFAULT_GOAL := all
CONFIG ?= release
B := build/$(CONFIG)
DATA ?= ../shared
DEVICE ?= cpu
PREFIX ?= /usr/local
NVCC := $(shell command -v nvcc 2>/dev/null || ls /usr/local/cuda/bin/nvcc 2>/dev/null)
CUDA_HOME ?= $(patsubst %/bin/nvcc,%,$(NVCC))

WARN := -Wall -Wextra -Wpedantic -Wshadow -Wcast-align -Wpointer-arith -Wstrict-prototypes -Wmissing-prototypes \
        -Wvla -Wformat=2 -Wwrite-strings -Wswitch-enum
ifdef CI
WARN += -Werror
endif
ifeq ($(origin CC),default)
CC := gcc
endif
OPT := -O2
CFLAGS := -std=c11 -D_GNU_SOURCE -g $(WARN) -ffp-contract=off -pthread -I.
LDFLAGS := -pthread
LIBS := -lmicrohttpd -lopenblas -lcjson -lxxhash -lpcre2-8 -lutf8proc -lyaml -lm

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
ifeq ($(CONFIG),fuzz)
CC := clang
OPT := -O1
CFLAGS += -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=all
LDFLAGS += -fsanitize=fuzzer,address,undefined
endif
ifeq ($(CONFIG),arm64)
CC := aarch64-linux-gnu-gcc
ARM_ROOT := build/arm64-root
CFLAGS += -isystem $(ARM_ROOT)/usr/include -isystem $(ARM_ROOT)/usr/include/aarch64-linux-gnu/openblas-pthread
LDFLAGS += -L$(ARM_ROOT)/usr/lib/aarch64-linux-gnu -Wl,-rpath-link,$(ARM_ROOT)/usr/lib/aarch64-linux-gnu
RUN := X3_EMULATED=1 QEMU_LD_PREFIX=/usr/aarch64-linux-gnu QEMU_SET_ENV=LD_LIBRARY_PATH=$(ARM_ROOT)/usr/lib/aarch64-linux-gnu:/usr/aarch64-linux-gnu/lib qemu-aarch64
endif

# CUDA_ARCHS=90 builds for one architecture, which takes a seventh of the time.
ifeq ($(CONFIG),cuda)
CUDA_ARCHS ?= $(filter 80 86 89 90 100 120 121,$(patsubst sm_%,%,$(shell $(NVCC) --list-gpu-code)))
CUDA_PTX ?= $(or $(filter 100,$(CUDA_ARCHS)),$(lastword $(CUDA_ARCHS)))
NVCC_FLAGS := -std=c++17 -O3 -fmad=false -I. -MMD -MP -Xcompiler -Wall,-Wextra \
              $(foreach a,$(CUDA_ARCHS),-gencode arch=compute_$(a),code=sm_$(a)) -gencode arch=compute_$(CUDA_PTX),code=compute_$(CUDA_PTX)
comma := ,
ifdef CI
NVCC_FLAGS += -Werror all-warnings -Xcompiler -Werror
endif
CFLAGS += -DX3_CUDA -isystem $(CUDA_HOME)/include
LIBS += -L$(CUDA_HOME)/lib64 -lcudart_static -lstdc++ -ldl -lrt
endif

ARCH := $(shell $(CC) -dumpmachine 2>/dev/null | cut -d- -f1)
ISAS_x86_64 := avx2 avx512
ISAS_aarch64 := neon
ISAS := $(ISAS_$(ARCH))
ISA_FLAGS_avx2 := -mavx2 -mfma -mf16c
ISA_FLAGS_avx512 := -mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c -mprefer-vector-width=512

FOLDERS := formats kernels runtime runtime/device runtime/tokenizer runtime/jinja runtime/serve calib quant
TOOLS := exl3-quantize exl3-eval exl3-serve
SIMD_SRC := $(wildcard kernels/*_simd.c)
CUDA_C := $(wildcard runtime/device/device_cuda*.c runtime/device/cuda_*.c)
CUDA_K := $(wildcard kernels/*_k_cuda.cu)
CUDA_SRC := $(filter-out $(CUDA_K),$(wildcard kernels/*_cuda.cu))
LIB_SRC := $(filter-out $(SIMD_SRC) $(if $(filter cuda,$(CONFIG)),,$(CUDA_C)),$(wildcard $(addsuffix /*.c,$(FOLDERS))))
CUDA_OBJ := $(if $(filter cuda,$(CONFIG)),$(CUDA_SRC:%.cu=$(B)/%.o) $(foreach k,1 2 3 4 5 6 7 8,$(CUDA_K:%.cu=$(B)/%$(k).o)))
LIB_OBJ := $(CUDA_OBJ) $(B)/source_id.o $(LIB_SRC:%.c=$(B)/%.o) $(foreach i,$(ISAS),$(SIMD_SRC:%.c=$(B)/%.$(i).o))
TOOL_OBJ := $(patsubst %.c,$(B)/%.o,$(filter-out tools/exl3_%.c,$(wildcard tools/*.c)))
TEST_OBJ := $(patsubst %.c,$(B)/%.o,$(wildcard tests/test_*.c) tests/tiny_model.c tests/family_check.c tests/family_job.c tests/http_client.c)
CONF_OBJ := $(patsubst %.c,$(B)/%.o,$(wildcard tests/conformance/*.c)) $(B)/tests/test_main.o $(B)/tests/family_check.o
CUDA_TEST_OBJ := $(patsubst %.c,$(B)/%.o,$(wildcard tests/cuda/test_*.c)) $(B)/tests/test_main.o $(B)/tests/tiny_model.o \
                 $(B)/tests/family_check.o
FUZZERS := $(patsubst tests/fuzz_%.c,%,$(wildcard tests/fuzz_*.c))

# ---- for people ------------------------------------------------------------------------------------------------

.PHONY: help all compile deps demo test asan ubsan fuzz arm64 conformance bench bench-encoder bench-anchor bench-plan bench-kl bench-plan-kl bench-serve \
        bench-families smollm2 \
        cuda cuda-compile test-cuda bench-cuda check install clean
help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## /{printf "  make %-14s %s\n", $$1, $$2}' Makefile

demo: deps ## install what is missing, build, quantize the bundled model, print what was lost
	@$(MAKE) --no-print-directory all
	@tools/demo.sh $(B)

all: $(TOOLS:%=$(B)/%) ## build the programs into build/release

deps: ## install missing Debian packages
	@tools/install_packages.sh

test: deps ## the test suite; WORDS="a b" runs the tests whose names contain one of them
	@$(MAKE) --no-print-directory $(B)/tests/tests $(TOOLS:%=$(B)/%)
	$(RUN) $(B)/tests/tests $(WORDS)

asan: ## the test suite under the address and undefined-behaviour sanitizers
	@$(MAKE) --no-print-directory CONFIG=asan test

ubsan: ## the same with clang's undefined-behaviour sanitizer
	@$(MAKE) --no-print-directory CONFIG=ubsan test

arm64: ## cross-build for 64-bit Arm and run the test suite under qemu-user
	@tools/install_packages.sh dev
	@tools/arm64_libraries.sh build/arm64-root
	@$(MAKE) --no-print-directory CONFIG=arm64 test

FUZZ_SECONDS ?= 30
fuzz: ## every fuzz target for FUZZ_SECONDS (30) each
	@tools/install_packages.sh dev
	@$(MAKE) --no-print-directory CONFIG=fuzz $(FUZZERS:%=build/fuzz/fuzz_%)
	@for f in $(FUZZERS); do echo "== $$f"; mkdir -p build/fuzz/corpus_$$f; \
	  build/fuzz/fuzz_$$f -max_total_time=$(FUZZ_SECONDS) -print_final_stats=0 -verbosity=0 build/fuzz/corpus_$$f || exit 1; done

conformance: $(B)/tests/conformance_tests ## checks against the shared material (DATA=../shared)
	$(RUN) $(B)/tests/conformance_tests --data $(DATA) $(WORDS)

bench-families: all ## packs of the tiny families at 3, 4 and 6 bits (45 packs)
	tools/bench_families.sh $(B) $(DATA)

bench: bench-encoder bench-anchor bench-serve ## the short tables; the long ones are bench-kl and smollm2

bench-encoder: $(B)/tests/bench_encoder ## weights a second of the trellis search
	$(B)/tests/bench_encoder

bench-anchor: $(B)/tests/bench_anchor ## error of single linears beside the peer's (DATA=../shared)
	$(B)/tests/bench_anchor $(DATA)

SERVE_PACK ?= tests/data/models/tiny-qwen3
SERVE_DEVICE ?= $(if $(filter cuda,$(CONFIG)),cuda,cpu)
bench-serve: $(B)/tests/bench_serve ## prefill and decode tokens/s; SERVE_PACK=folder (the bundled model), CONFIG=cuda for the GPU
	$(B)/tests/bench_serve $(SERVE_PACK) $(SERVE_DEVICE)

bench-plan: all $(B)/tests/bench_plan ## seconds and memory of a plan for a model of GLM-5.3's full shape
	$(B)/tests/bench_plan $(B)/exl3-quantize build/bench-plan

bench-kl: all ## KL of tiny-qwen3 packs beside the peer's, seeds 1 to 3 (about an hour)
	tools/bench_kl.sh $(B) $(DATA)

bench-plan-kl: all ## planned packs beside uniform ones and the peer's, three models, seeds 1 to 3 (many hours on a CPU, minutes on a GPU)
	tools/bench_plan_kl.sh $(B) $(DATA) "tiny-qwen3 tiny-glm-moe small-qwen3-moe" "2.0 2.5 3.0 4.0" $(DEVICE)

smollm2: all $(B)/tests/conformance_tests ## SmolLM2-135M: ids, logits, packs of 4 and 3 bits; MODEL=folder made by make_smollm2.py
	SMOLLM2=$(MODEL) $(B)/tests/conformance_tests --data $(DATA) smollm2
	tools/bench_smollm2.sh $(B) $(DATA) $(MODEL)

check: ## include order, static analysis where clang-tidy or cppcheck are installed
	@tools/check_includes.sh
	@if command -v cppcheck >/dev/null; then cppcheck -q --std=c11 --enable=warning,portability --inline-suppr \
	  --suppress=missingIncludeSystem -I. $(filter-out runtime/%,$(FOLDERS)) tools; fi

compile: $(TOOLS:%=$(B)/%) $(B)/tests/tests $(B)/tests/conformance_tests ## build programs and tests, run nothing

install: all ## copy the programs to PREFIX/bin (/usr/local)
	install -d $(DESTDIR)$(PREFIX)/bin
	install -m 755 $(TOOLS:%=$(B)/%) $(DESTDIR)$(PREFIX)/bin

cuda: ## build with CUDA into build/cuda; CUDA_ARCHS=90 for one architecture
	@[ -n "$(NVCC)" ] || { echo "nvcc is not installed (CUDA Toolkit)"; exit 1; }
	@$(MAKE) --no-print-directory CONFIG=cuda cuda-compile

cuda-compile: $(TOOLS:%=$(B)/%) $(B)/tests/cuda/tests $(B)/tests/cuda/test_kernels $(B)/tests/cuda/bench_kernels \
              $(B)/tests/cuda/bench_group $(B)/tests/bench_swaps $(B)/tests/bench_serve

test-cuda: cuda ## CUDA kernels and device against their reference forms; skipped, and counted, without a GPU
	@tests/cuda/run.sh build/cuda

bench-cuda: cuda ## times of the CUDA kernels beside the peer's
	build/cuda/tests/cuda/bench_kernels
	build/cuda/tests/cuda/bench_group

clean: ## remove the build folder
	rm -rf build

# ---- rules -----------------------------------------------------------------------------------------------------

$(B)/exl3-%: $(B)/tools/exl3_%.o $(TOOL_OBJ) $(LIB_OBJ)
	@echo "LINK $@"; $(CC) $(LDFLAGS) -o $@ $^ $(LIBS)

$(B)/tests/cuda/tests: $(CUDA_TEST_OBJ) $(LIB_OBJ)
	@echo "LINK $@"; $(CC) $(LDFLAGS) -o $@ $^ $(LIBS)

$(B)/tests/cuda/%: $(B)/tests/cuda/%.o $(LIB_OBJ)
	@echo "LINK $@"; $(CC) $(LDFLAGS) -o $@ $^ $(LIBS)

$(B)/tests/tests: $(TEST_OBJ) $(LIB_OBJ)
	@echo "LINK $@"; $(CC) $(LDFLAGS) -o $@ $^ $(LIBS)

$(B)/tests/conformance_tests: $(CONF_OBJ) $(LIB_OBJ)
	@echo "LINK $@"; $(CC) $(LDFLAGS) -o $@ $^ $(LIBS)

$(B)/tests/bench_%: $(B)/tests/bench_%.o $(LIB_OBJ)
	@echo "LINK $@"; $(CC) $(LDFLAGS) -o $@ $^ $(LIBS)

$(B)/fuzz_%: $(B)/tests/fuzz_%.o $(LIB_OBJ)
	@echo "LINK $@"; $(CC) $(LDFLAGS) -o $@ $^ $(LIBS)

# The revision is compiled in; its file changes only when the revision does.
SOURCE_ID := $(shell git rev-parse --short=12 HEAD 2>/dev/null || echo unknown)
$(shell mkdir -p $(B); printf 'const char *x3_source_id(void);\nconst char *x3_source_id(void)\n{\n    return "%s";\n}\n' \
  '$(SOURCE_ID)' > $(B)/source_id.new; cmp -s $(B)/source_id.new $(B)/source_id.c || cp $(B)/source_id.new $(B)/source_id.c)
$(B)/source_id.o: $(B)/source_id.c
	@$(CC) $(CFLAGS) -c $< -o $@

# gcc 12 for aarch64 dies in its vectorizer on one of these tests.
$(B)/tests/test_moe_job.o: CFLAGS += -fno-tree-vectorize

# The assembler reads the page; the compiler does not say so.
$(B)/runtime/serve/server_page.o: runtime/serve/server_page.html

$(B)/%.o: %.c Makefile
	@mkdir -p $(@D)
	@echo "CC $<"; $(CC) $(CFLAGS) $(OPT) -MMD -MP -c $< -o $@

# The CUDA sources take minutes: they are compiled again when their flags change, not when this file does.
ifeq ($(CONFIG),cuda)
$(shell mkdir -p $(B); echo '$(NVCC) $(NVCC_FLAGS)' | cmp -s - $(B)/nvcc_flags || echo '$(NVCC) $(NVCC_FLAGS)' > $(B)/nvcc_flags)
endif

# Hopper's own instructions are in no other target.
ifneq ($(filter 90,$(CUDA_ARCHS)),)
$(B)/kernels/%_hopper_cuda.o: NVCC_FLAGS := $(subst compute_90$(comma)code=sm_90,compute_90a$(comma)code=sm_90a,$(NVCC_FLAGS)) -DX3_SM90A
endif

$(B)/%.o: %.cu $(B)/nvcc_flags
	@mkdir -p $(@D)
	@echo "NVCC $<"; $(NVCC) $(NVCC_FLAGS) -c $< -o $@

# One source, one object a K.
define cuda_k_rule
$(B)/%_k_cuda$(1).o: %_k_cuda.cu $(B)/nvcc_flags
	@mkdir -p $$(@D)
	@echo "NVCC $$< (K = $(1))"; $(NVCC) $(NVCC_FLAGS) -DX3_K=$(1) -c $$< -o $$@
endef
$(foreach k,1 2 3 4 5 6 7 8,$(eval $(call cuda_k_rule,$(k))))

# One source, one object an instruction set; -O3 unrolls the small loops over vectors into registers.
define simd_rule
$(B)/%.$(1).o: %.c Makefile
	@mkdir -p $$(@D)
	@echo "CC $$< ($(1))"; $(CC) $(CFLAGS) -O3 $(ISA_FLAGS_$(1)) -DX3_ISA=$(1) -MMD -MP -c $$< -o $$@
endef
$(foreach i,$(ISAS),$(eval $(call simd_rule,$(i))))

.PRECIOUS: $(B)/%.o
-include $(LIB_OBJ:.o=.d) $(wildcard $(B)/tools/*.d $(B)/tests/*.d $(B)/tests/conformance/*.d $(B)/tests/cuda/*.d)
