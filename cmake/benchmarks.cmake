# qkv_scaling, which predicts how calls scale to many cores: benchmarks/scaling.
add_library(qkv_simulator STATIC EXCLUDE_FROM_ALL
  ${PROJECT_SOURCE_DIR}/benchmarks/scaling/counted.cpp
  ${PROJECT_SOURCE_DIR}/benchmarks/scaling/shapes.cpp
  ${PROJECT_SOURCE_DIR}/benchmarks/scaling/simulator.cpp)
target_include_directories(qkv_simulator PUBLIC ${PROJECT_SOURCE_DIR}/benchmarks/scaling)
target_link_libraries(qkv_simulator PUBLIC qkv_kernels)
target_compile_options(qkv_simulator PRIVATE -Wall -Wextra)
if(QKV_SANITIZE AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # GCC 12 warns about its own <regex> when it compiles for a sanitizer.
  target_compile_options(qkv_simulator PRIVATE -Wno-maybe-uninitialized)
endif()

add_executable(qkv_scaling EXCLUDE_FROM_ALL ${PROJECT_SOURCE_DIR}/benchmarks/scaling/main.cpp)
target_compile_options(qkv_scaling PRIVATE -fopenmp -Wall -Wextra)
target_link_libraries(qkv_scaling PRIVATE qkv_simulator -fopenmp)
