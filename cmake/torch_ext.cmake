# qkv: the operators, one shared library for Python and C++.
set(CMAKE_MESSAGE_LOG_LEVEL ERROR)  # it warns of libraries that no one needs
find_package(Torch QUIET)
unset(CMAKE_MESSAGE_LOG_LEVEL)
if(NOT Torch_FOUND)
  message(FATAL_ERROR "CMake cannot find torch. Install it (pip install torch) and configure with\n"
    "  -DCMAKE_PREFIX_PATH=\"$(python -c 'import torch; print(torch.utils.cmake_prefix_path)')\"\n"
    "or build only the torch-free kernels with -DQKV_TORCH=OFF")
endif()
if(NOT CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  message(FATAL_ERROR "libqkv.so must share torch's OpenMP runtime, libgomp: build it with g++ "
    "(CXX=g++), not ${CMAKE_CXX_COMPILER_ID}")
endif()
string(REGEX MATCH "^[0-9]+\\.[0-9]+" QKV_TORCH_MINOR "${Torch_VERSION}")

file(GLOB operator_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/torch_ext/*.cpp)
add_library(qkv SHARED ${operator_sources})
target_compile_features(qkv PUBLIC cxx_std_20)  # torch's headers
target_compile_options(qkv PRIVATE -Wall -Wextra -Wno-maybe-uninitialized)
target_include_directories(qkv
  PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/torch_ext/include>
         $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>
  PRIVATE ${PROJECT_SOURCE_DIR}/torch_ext)
target_link_libraries(qkv PUBLIC torch PRIVATE $<BUILD_INTERFACE:qkv_kernels>)
target_precompile_headers(qkv PRIVATE <torch/library.h>)  # most of the build's time

# One OpenMP runtime in the process: the copy that torch brings, whatever its
# name, or failing that the system's, which torch then uses too.
get_target_property(torch_library torch LOCATION)
get_filename_component(torch_lib_dir "${torch_library}" DIRECTORY)
file(GLOB torch_openmp "${torch_lib_dir}/libgomp*.so*" "${torch_lib_dir}/libiomp5.so")
if(torch_openmp)
  list(GET torch_openmp 0 torch_openmp)
else()
  set(torch_openmp -fopenmp)
endif()
target_link_libraries(qkv PRIVATE $<BUILD_INTERFACE:${torch_openmp}>)

# Found beside torch in site-packages, else where torch was at build time (an
# editable install, or torch in another site-packages).
set_target_properties(qkv PROPERTIES
  BUILD_RPATH "${torch_lib_dir}"
  INSTALL_RPATH "$ORIGIN/../../torch/lib;${torch_lib_dir}")

include(CMakePackageConfigHelpers)
set(QKV_CMAKE_DIR share/cmake/qkv)
install(TARGETS qkv EXPORT qkvTargets LIBRARY DESTINATION lib)
install(DIRECTORY torch_ext/include/ DESTINATION include)
install(EXPORT qkvTargets NAMESPACE qkv:: DESTINATION ${QKV_CMAKE_DIR})
configure_package_config_file(cmake/qkvConfig.cmake.in qkvConfig.cmake
  INSTALL_DESTINATION ${QKV_CMAKE_DIR} NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(qkvConfigVersion.cmake COMPATIBILITY SameMinorVersion)
file(WRITE ${PROJECT_BINARY_DIR}/torch_version.txt "${Torch_VERSION}\n")
install(FILES ${PROJECT_BINARY_DIR}/qkvConfig.cmake ${PROJECT_BINARY_DIR}/qkvConfigVersion.cmake
        DESTINATION ${QKV_CMAKE_DIR})
install(FILES ${PROJECT_BINARY_DIR}/torch_version.txt DESTINATION lib)
