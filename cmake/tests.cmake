# The programs qkv_csrc_tests and qkv_torch_tests, which ctest runs.
find_package(GTest)
if(NOT GTest_FOUND AND EXISTS /usr/src/googletest/CMakeLists.txt)
  # Debian's sources of GoogleTest, since it has no library of it for another architecture.
  set(INSTALL_GTEST OFF)
  set(BUILD_GMOCK OFF)
  add_subdirectory(/usr/src/googletest googletest EXCLUDE_FROM_ALL)
elseif(NOT GTest_FOUND)
  message(FATAL_ERROR "CMake cannot find GoogleTest, which the tests need: apt-get install libgtest-dev")
endif()
include(GoogleTest)
enable_testing()

file(GLOB csrc_tests CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tests/csrc/*.cpp)
if(csrc_tests)
  # The kernels are held against the reference, and only the tests link it.
  file(GLOB reference CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tests/reference/*.cpp)
  add_library(qkv_reference STATIC ${reference})
  target_include_directories(qkv_reference PUBLIC ${PROJECT_SOURCE_DIR}/csrc ${PROJECT_SOURCE_DIR}/tests)
  target_compile_features(qkv_reference PUBLIC cxx_std_17)
  target_compile_options(qkv_reference PRIVATE $<TARGET_PROPERTY:qkv_kernels,COMPILE_OPTIONS>)

  # The twins: kernels for instructions that few CPUs have, with those instructions in C++. A tree
  # may leave out some that another one tests; then their tests have to be left out, too:
  # --gtest_filter=-*/emulated_avx512bf16
  set(QKV_EMULATED_ISAS "amx;avx512bf16" CACHE STRING "Emulated instruction sets in the tests")
  file(WRITE ${PROJECT_BINARY_DIR}/none_emulated.cpp "")
  add_library(qkv_emulated OBJECT ${PROJECT_BINARY_DIR}/none_emulated.cpp)
  foreach(isa IN LISTS QKV_EMULATED_ISAS)
    target_sources(qkv_emulated PRIVATE ${PROJECT_SOURCE_DIR}/tests/csrc/emulated/${isa}.cpp)
  endforeach()
  target_include_directories(qkv_emulated PRIVATE ${PROJECT_SOURCE_DIR}/tests/csrc)
  target_link_libraries(qkv_emulated PRIVATE qkv_kernels)
  target_compile_options(qkv_emulated PRIVATE $<TARGET_PROPERTY:qkv_kernels,COMPILE_OPTIONS>)

  # What kernels are made of, compiled once more for each instruction set, so that tests can call it.
  set(parts generic neon avx2 avx512 avx512bf16 amx)
  if(NOT QKV_AVX512)
    set(parts generic neon avx2)
  endif()
  add_library(qkv_parts OBJECT ${PROJECT_SOURCE_DIR}/tests/csrc/parts/parts.cpp)
  foreach(isa IN LISTS parts)
    target_sources(qkv_parts PRIVATE ${PROJECT_SOURCE_DIR}/tests/csrc/parts/${isa}.cpp)
  endforeach()
  foreach(isa IN LISTS QKV_EMULATED_ISAS)
    target_sources(qkv_parts PRIVATE ${PROJECT_SOURCE_DIR}/tests/csrc/parts/emulated_${isa}.cpp)
    # Twins are as fast with -O1, and compiled in half the time (33 and 18 s of one core of a Zen 4).
    set_source_files_properties(${PROJECT_SOURCE_DIR}/tests/csrc/emulated/${isa}.cpp
      ${PROJECT_SOURCE_DIR}/tests/csrc/parts/emulated_${isa}.cpp PROPERTIES COMPILE_OPTIONS -O1)
  endforeach()
  target_include_directories(qkv_parts PRIVATE ${PROJECT_SOURCE_DIR}/tests/csrc)
  target_link_libraries(qkv_parts PRIVATE qkv_kernels)
  target_compile_options(qkv_parts PRIVATE $<TARGET_PROPERTY:qkv_kernels,COMPILE_OPTIONS>)

  # The tests are objects, so that the same ones are linked with kernels and with sanitized kernels.
  add_library(qkv_csrc_test_objects OBJECT ${csrc_tests})
  # The tests spend their time in the library, and with -O1 compiling them takes a quarter less.
  target_compile_options(qkv_csrc_test_objects PRIVATE -O1 -fopenmp -Wall -Wextra)
  # What each of them takes most time for is headers, and templates of GoogleTest and the standard
  # library, which twelve files together take once.
  set_target_properties(qkv_csrc_test_objects PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 12)
  list(JOIN CMAKE_CROSSCOMPILING_EMULATOR " " emulator)  # for tests that start the program again
  target_compile_definitions(qkv_csrc_test_objects PRIVATE "QKV_TEST_EMULATOR=\"${emulator}\"")
  target_link_libraries(qkv_csrc_test_objects PRIVATE qkv_reference qkv_simulator qkv_kernels GTest::gtest)

  add_executable(qkv_csrc_tests
    $<TARGET_OBJECTS:qkv_csrc_test_objects> $<TARGET_OBJECTS:qkv_emulated> $<TARGET_OBJECTS:qkv_parts>)
  target_link_libraries(qkv_csrc_tests PRIVATE
    qkv_reference qkv_simulator qkv_kernels GTest::gtest_main -fopenmp)
  gtest_discover_tests(qkv_csrc_tests DISCOVERY_MODE PRE_TEST)
  if(NOT QKV_SANITIZE)
    include(cmake/sanitized_tests.cmake)
  endif()
endif()

if(QKV_TORCH)
  # The library with the emulated instruction sets: QKV_LIBRARY=<build>/emulated/libqkv.so lets
  # Python's tests run on them (tests/emulation/twins.sh).
  add_library(qkv_with_emulated SHARED EXCLUDE_FROM_ALL $<TARGET_OBJECTS:qkv> $<TARGET_OBJECTS:qkv_emulated>)
  set_target_properties(qkv_with_emulated PROPERTIES
    OUTPUT_NAME qkv
    LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/emulated)
  target_link_libraries(qkv_with_emulated PRIVATE qkv_kernels $<TARGET_PROPERTY:qkv,QKV_RUNTIME>)

  file(GLOB torch_tests CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tests/torch_ext/*.cpp)
  if(torch_tests)
    add_executable(qkv_torch_tests ${torch_tests})
    target_compile_options(qkv_torch_tests PRIVATE -O0 -Wall -Wextra)
    # Twelve files are compiled as one, so each has a namespace of its own.
    set_target_properties(qkv_torch_tests PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 12)
    target_link_libraries(qkv_torch_tests PRIVATE qkv qkv_reference GTest::gtest_main)
    if(QKV_SANITIZE)
      # libasan has to be the first library of a program.
      target_link_options(qkv_torch_tests PRIVATE -fsanitize=address,undefined)
    endif()
    gtest_discover_tests(qkv_torch_tests DISCOVERY_MODE PRE_TEST)
  endif()

  # What valgrind counts the instructions of: tests/instructions.
  find_path(QKV_VALGRIND valgrind/callgrind.h)
  if(QKV_VALGRIND)
    add_executable(qkv_instructions EXCLUDE_FROM_ALL
      ${PROJECT_SOURCE_DIR}/tests/instructions/calls.cpp
      ${PROJECT_SOURCE_DIR}/tests/instructions/memory.cpp)
    target_include_directories(qkv_instructions PRIVATE ${QKV_VALGRIND})
    target_compile_options(qkv_instructions PRIVATE -O1 -Wall -Wextra)
    target_link_libraries(qkv_instructions PRIVATE qkv)
  endif()
endif()
