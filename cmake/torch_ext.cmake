# qkv: the operators, one shared library for Python and C++.
include(cmake/qkvTorch.cmake)
qkv_find_torch()
if(NOT QKV_TORCH_FOLDER)
  message(FATAL_ERROR "CMake cannot find torch. Install it (pip install torch) and configure with\n"
    "  -DCMAKE_PREFIX_PATH=\"$(python -c 'import torch; print(torch.utils.cmake_prefix_path)')\"\n"
    "or build only the torch-free kernels with -DQKV_TORCH=OFF")
endif()
message(STATUS "torch ${QKV_TORCH_VERSION} in ${QKV_TORCH_FOLDER}")
if(NOT CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  message(FATAL_ERROR "libqkv.so must share torch's OpenMP runtime, libgomp: build it with g++ "
    "(CXX=g++), not ${CMAKE_CXX_COMPILER_ID}")
endif()
string(REGEX MATCH "^[0-9]+\\.[0-9]+" QKV_TORCH_MINOR "${QKV_TORCH_VERSION}")

file(GLOB operator_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/torch_ext/*.cpp)
add_library(qkv SHARED ${operator_sources})
target_compile_definitions(qkv PRIVATE QKV_VERSION="${PROJECT_VERSION}")
target_compile_options(qkv PRIVATE -Wall -Wextra -Wno-maybe-uninitialized)
target_include_directories(qkv
  PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/torch_ext/include>
         $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>
  PRIVATE ${PROJECT_SOURCE_DIR}/torch_ext)
target_link_libraries(qkv PUBLIC qkv::torch PRIVATE $<BUILD_INTERFACE:qkv_kernels>)
target_precompile_headers(qkv PRIVATE <torch/library.h>)  # most of the build's time

# One OpenMP runtime in the process: the copy that torch brings, whatever its
# name, or failing that the system's, which torch then uses too.
set(torch_lib_dir "${QKV_TORCH_FOLDER}/lib")
file(GLOB torch_openmp "${torch_lib_dir}/libgomp*.so*" "${torch_lib_dir}/libiomp5.so")
if(torch_openmp)
  list(GET torch_openmp 0 torch_openmp)
else()
  set(torch_openmp -fopenmp)
endif()
target_link_libraries(qkv PRIVATE $<BUILD_INTERFACE:${torch_openmp}>)

# Libraries for several torches lie side by side in one package. Each finds torch beside the package
# in site-packages, else where it was at build time (an editable install, or torch in another
# site-packages), which means nothing on the machine of someone who gets a wheel.
option(QKV_RELOCATABLE "Leave no path of this machine in what is installed" OFF)
if(QKV_RELOCATABLE)
  set(torch_at_build_time "")
else()
  set(torch_at_build_time "${QKV_TORCH_FOLDER}")
  set(torch_lib_at_build_time ";${torch_lib_dir}")
endif()
set(lib_dir lib/torch-${QKV_TORCH_MINOR})
set_target_properties(qkv PROPERTIES
  BUILD_RPATH "${torch_lib_dir}"
  INSTALL_RPATH "$ORIGIN/../../../torch/lib${torch_lib_at_build_time}")

include(CMakePackageConfigHelpers)
set(QKV_CMAKE_DIR share/cmake/qkv)
install(TARGETS qkv EXPORT qkvTargets LIBRARY DESTINATION ${lib_dir})
install(DIRECTORY torch_ext/include/ DESTINATION include)
install(EXPORT qkvTargets NAMESPACE qkv:: FILE qkvTargets-torch-${QKV_TORCH_MINOR}.cmake
        DESTINATION ${QKV_CMAKE_DIR})
configure_package_config_file(cmake/qkvConfig.cmake.in qkvConfig.cmake
  INSTALL_DESTINATION ${QKV_CMAKE_DIR} NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(qkvConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/qkvConfig.cmake ${PROJECT_BINARY_DIR}/qkvConfigVersion.cmake
              cmake/qkvTorch.cmake
        DESTINATION ${QKV_CMAKE_DIR})
