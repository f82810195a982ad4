# qkv_csrc_tests_sanitized: the torch-free tests on kernels with AddressSanitizer and
# UndefinedBehaviorSanitizer. The tests themselves, and the kernels of instruction sets that are not
# asked for, are the objects that qkv_csrc_tests has: only what is looked at is compiled once more.
set(QKV_SANITIZED_ISAS "isa/avx2;isa/neon" CACHE STRING
  "Folders of csrc/isa, and files of tests/csrc/emulated, whose kernels are compiled with sanitizers")
list(JOIN QKV_SANITIZED_ISAS "|" sanitized)
set(sanitized "/(${sanitized})(/kernels)?\\.cpp")

file(GLOB emulated_sources ${PROJECT_SOURCE_DIR}/tests/csrc/emulated/*.cpp)
set(sanitized_kernels ${kernel_sources} ${emulated_sources})
list(FILTER sanitized_kernels INCLUDE REGEX "${sanitized}")
set(sanitized_drivers ${kernel_sources})
list(FILTER sanitized_drivers EXCLUDE REGEX "/isa/")

# A sanitizer has its own operators new and delete, and with it tests cannot count what they
# allocate: allocations.cpp is compiled anew, without its operators, and these tests are left out.
# What is left out of a program has objects of its own, which no other file is compiled into.
set_source_files_properties(${PROJECT_SOURCE_DIR}/tests/csrc/allocations.cpp
  ${PROJECT_SOURCE_DIR}/tests/csrc/test_memory.cpp ${PROJECT_SOURCE_DIR}/tests/csrc/test_scaling.cpp
  PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
add_library(qkv_sanitized OBJECT EXCLUDE_FROM_ALL ${sanitized_drivers} ${sanitized_kernels}
  ${PROJECT_SOURCE_DIR}/tests/csrc/allocations.cpp)
target_include_directories(qkv_sanitized PRIVATE
  ${PROJECT_SOURCE_DIR}/csrc ${PROJECT_SOURCE_DIR}/tests/csrc)
target_compile_features(qkv_sanitized PRIVATE cxx_std_17)
target_compile_options(qkv_sanitized PRIVATE
  $<TARGET_PROPERTY:qkv_kernels,COMPILE_OPTIONS> ${qkv_sanitizer_options})
target_compile_definitions(qkv_sanitized PRIVATE QKV_CHECK_SCORES)
set(QKV_SANITIZED_WITHOUT "" CACHE STRING
  "Checks of UndefinedBehaviorSanitizer that these kernels are compiled without")
if(QKV_SANITIZED_WITHOUT)
  target_compile_options(qkv_sanitized PRIVATE -fno-sanitize=${QKV_SANITIZED_WITHOUT})
endif()

# The sanitized objects come first, because the linker takes the first of an inline function's copies.
set(tests $<TARGET_OBJECTS:qkv_csrc_test_objects>)
set(kernels $<FILTER:$<TARGET_OBJECTS:qkv_kernels>,INCLUDE,/isa/> $<TARGET_OBJECTS:qkv_emulated>)
add_executable(qkv_csrc_tests_sanitized EXCLUDE_FROM_ALL $<TARGET_OBJECTS:qkv_sanitized>
  "$<FILTER:${tests},EXCLUDE,/(allocations|test_memory|test_scaling)\\.cpp>"
  "$<FILTER:${kernels},EXCLUDE,${sanitized}>" $<TARGET_OBJECTS:qkv_parts>)
target_link_libraries(qkv_csrc_tests_sanitized PRIVATE qkv_reference GTest::gtest_main -fopenmp)
target_link_options(qkv_csrc_tests_sanitized PRIVATE ${qkv_sanitizer_options})
