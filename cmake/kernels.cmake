# qkv_kernels: the torch-free kernels, of which cmake/torch_ext.cmake makes libqkv_core.so. Vector
# code chooses its own target with pragmas, so there are no -m flags here.
file(GLOB kernel_sources CONFIGURE_DEPENDS
     ${PROJECT_SOURCE_DIR}/csrc/dispatch/*.cpp
     ${PROJECT_SOURCE_DIR}/csrc/*.cpp
     ${PROJECT_SOURCE_DIR}/csrc/drivers/*.cpp
     ${PROJECT_SOURCE_DIR}/csrc/program/*.cpp
     ${PROJECT_SOURCE_DIR}/csrc/isa/*/*.cpp
     ${PROJECT_SOURCE_DIR}/csrc/probe/*.cpp
     ${PROJECT_SOURCE_DIR}/csrc/threads/*.cpp)

# The kernels are most of what there is to compile, with sanitizers most of all. A tree whose tests
# take AVX2 alone does without the better half of them.
option(QKV_AVX512 "Kernels for AVX-512 and for what builds on it, AVX512-BF16 and AMX" ON)
if(NOT QKV_AVX512)
  list(FILTER kernel_sources EXCLUDE REGEX "/csrc/isa/(avx512|avx512bf16|amx)/")
  list(APPEND kernel_sources ${PROJECT_SOURCE_DIR}/csrc/isa/without_avx512.cpp)
endif()

add_library(qkv_kernels OBJECT ${kernel_sources})
target_include_directories(qkv_kernels PUBLIC ${PROJECT_SOURCE_DIR}/csrc)
target_compile_features(qkv_kernels PUBLIC cxx_std_17)

# There is no -ffast-math, because NaN and infinity must come out as torch's.
target_compile_options(qkv_kernels PRIVATE
  $<$<NOT:$<CONFIG:Debug>>:-O2> -ffp-contract=fast -fno-math-errno -fno-trapping-math
  -Wall -Wextra)
# Where bits are fixed, no compiler decides what is rounded: in kernels that are compiled for this
# (csrc/kernels/fixed_bits.h), and in drivers, whose instructions differ from one architecture to the
# next.
set(fixed_sources ${kernel_sources})
list(FILTER fixed_sources EXCLUDE REGEX "/isa/[a-z0-9]+/kernels.cpp$")
set_source_files_properties(${fixed_sources} PROPERTIES COMPILE_OPTIONS -ffp-contract=off)
# Generic code calls a function for each multiply-add that has fixed bits, and is 25 times slower
# with any -O. With -O1 it compiles in 18 instead of 28 seconds (one core of a Zen 5).
set_property(SOURCE ${PROJECT_SOURCE_DIR}/csrc/isa/generic/fixed_bits.cpp APPEND PROPERTY
  COMPILE_OPTIONS -O1)
# A program that is linked with -static brings its glibc along, and that one has no old versions.
if(NOT CMAKE_EXE_LINKER_FLAGS MATCHES "-static( |$)")
  # The two are one word, which a folder with a space in its name leaves whole.
  target_compile_options(qkv_kernels PRIVATE "-include${PROJECT_SOURCE_DIR}/csrc/common/old_glibc.h")
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # Code after a pragma that the compiler does not accept, or with a vector that is passed in
  # memory, is 40 times slower.
  target_compile_options(qkv_kernels PRIVATE -Werror=pragmas -Werror=psabi)
endif()

# The kernels are compiled with OpenMP, but not linked with it: whoever links the kernels chooses
# the runtime. libqkv.so takes the one that torch has loaded.
target_compile_options(qkv_kernels PRIVATE -fopenmp)

# Builds that look for mistakes stop where a backward pass makes other scores than the forward pass.
target_compile_definitions(qkv_kernels PRIVATE
  $<$<OR:$<BOOL:${QKV_SANITIZE}>,$<CONFIG:Debug>>:QKV_CHECK_SCORES>)

# With more than -O1 and -g1, a compilation of one minute takes seven.
set(sanitizers address,undefined)
if(QKV_SANITIZE STREQUAL "thread")
  set(sanitizers thread)
endif()
set(qkv_sanitizer_options
  -fsanitize=${sanitizers} -fno-sanitize-recover=all -fno-omit-frame-pointer -O1 -g1)
if(QKV_SANITIZE)
  # The options are PUBLIC, so that whoever uses the kernels is sanitized too. Python is not:
  # programs that load libqkv.so need libasan in LD_PRELOAD (tests/sanitized_torch.sh).
  target_compile_options(qkv_kernels PUBLIC ${qkv_sanitizer_options})
  target_link_options(qkv_kernels PUBLIC ${qkv_sanitizer_options})
endif()
