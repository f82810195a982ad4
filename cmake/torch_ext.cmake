# The operators, for one torch or for several. There is one libqkv.so for each minor version of
# torch, since torch's C++ interface changes with it, and one libqkv_core.so for all of them: the
# kernels, which know no torch.
#
#   one torch         lib/torch-2.13/libqkv.so  lib/torch-2.13/libqkv_core.so
#   several           lib/torch-2.13/libqkv.so  lib/torch-2.14/libqkv.so  ...  lib/libqkv_core.so
#
# Several builds for one torch each, installed into the same folder, keep a libqkv_core.so each:
# they may be of different states of the sources.
include(cmake/qkvTorch.cmake)
set(QKV_TORCHES "" CACHE STRING "Folders of the torches to build for; empty: the one that CMake finds")
if(NOT QKV_TORCHES)
  qkv_find_torch()
  if(NOT QKV_TORCH_FOLDER)
    message(FATAL_ERROR "CMake cannot find torch. Install it (pip install torch) and configure with\n"
      "  -DCMAKE_PREFIX_PATH=\"$(python -c 'import torch; print(torch.utils.cmake_prefix_path)')\"\n"
      "or build only the torch-free kernels with -DQKV_TORCH=OFF")
  endif()
  set(torches "${QKV_TORCH_FOLDER}")
else()
  set(torches ${QKV_TORCHES})
endif()
if(NOT CMAKE_CXX_COMPILER_ID STREQUAL "GNU")  # make and pip have asked preflight.py
  message(FATAL_ERROR "qkv shares torch's OpenMP runtime, libgomp, and ${CMAKE_CXX_COMPILER} is not g++")
endif()

# An editable install, or one whose torch is in another site-packages, finds torch where it was at
# build time. That means nothing on the machine of someone who gets a wheel.
option(QKV_RELOCATABLE "Leave no path of this machine in what is installed" OFF)

list(LENGTH torches torch_count)
if(torch_count EQUAL 1)
  set(core_beside_torch TRUE)
endif()

# The core names no OpenMP runtime: it finds the runtime's symbols in the libraries that are loaded
# with it, which is the runtime that torch brings, whatever its name.
add_library(qkv_core SHARED)
target_link_libraries(qkv_core PUBLIC $<BUILD_INTERFACE:qkv_kernels>)
set_target_properties(qkv_core PROPERTIES EXPORT_NAME core)

file(GLOB_RECURSE operator_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/torch_ext/*.cpp)

# qkv_add_operators(TARGET FOLDER): libqkv.so for the torch in FOLDER, and how it is installed.
function(qkv_add_operators target folder)
  _qkv_torch_at("${folder}" folder)
  if(NOT folder)
    message(FATAL_ERROR "QKV_TORCHES: there is no torch with C++ headers in ${ARGV1}")
  endif()
  _qkv_torch_version("${folder}" version)
  message(STATUS "torch ${version} in ${folder}")
  string(REGEX MATCH "^[0-9]+\\.[0-9]+" minor "${version}")
  set(torch torch-${minor})
  _qkv_add_torch(${torch} "${folder}")

  add_library(${target} SHARED ${operator_sources})
  add_library(qkv::${target} ALIAS ${target})  # as in find_package(qkv)
  target_compile_definitions(${target} PRIVATE QKV_VERSION="${PROJECT_VERSION}")
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wno-maybe-uninitialized
    "-ffile-prefix-map=${folder}/=")  # torch's messages name its headers by their paths
  target_include_directories(${target}
    PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/torch_ext/include>
           $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>
    PRIVATE ${PROJECT_SOURCE_DIR}/torch_ext)
  target_link_libraries(${target}
    PUBLIC $<BUILD_INTERFACE:${torch}> $<INSTALL_INTERFACE:qkv::torch> PRIVATE qkv_core)
  # torch's headers, and what is instantiated of them in every file, are most of the build's time. A
  # dozen files get all of ATen through other headers, whatever they include themselves.
  target_precompile_headers(${target} PRIVATE
    <ATen/ATen.h> <torch/csrc/autograd/function.h> <torch/library.h>)
  # Six files are compiled as one, which takes 63 CPU seconds for all of them in place of 157 (g++ 12
  # on a Zen 4). What one of them hides in a namespace without a name the others see.
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 6)

  # A program may call nothing of qkv and yet need it: it runs a model of TorchScript or AOTInductor
  # that names the operators. So the linker keeps the library, though --as-needed, which is the
  # default of many systems, would drop it.
  target_link_options(${target} INTERFACE
    "LINKER:--push-state,--no-as-needed,$<TARGET_FILE:qkv::qkv>,--pop-state")

  # The process must have one OpenMP runtime. It is the copy that torch brings, whatever its name,
  # or if there is none the system's, which torch then uses too.
  file(GLOB openmp "${folder}/lib/libgomp*.so*" "${folder}/lib/libiomp5.so")
  if(openmp)
    list(GET openmp 0 openmp)
  else()
    set(openmp -fopenmp)
  endif()
  target_link_libraries(${target} PRIVATE $<BUILD_INTERFACE:${openmp}>)
  set_property(TARGET ${target} PROPERTY QKV_RUNTIME ${torch} ${openmp})

  set(rpath "$ORIGIN/../../../torch/lib")  # beside qkv in site-packages
  if(core_beside_torch)
    list(PREPEND rpath "$ORIGIN")
    install(TARGETS qkv_core EXPORT qkv-${torch} LIBRARY DESTINATION lib/${torch})
  else()
    list(PREPEND rpath "$ORIGIN/..")
    install(TARGETS qkv_core EXPORT qkv-${torch} LIBRARY DESTINATION lib)
  endif()
  if(NOT QKV_RELOCATABLE)
    list(APPEND rpath "${folder}/lib")
    set(torch_at_build_time "${folder}" PARENT_SCOPE)
  endif()
  set_target_properties(${target} PROPERTIES
    OUTPUT_NAME qkv
    EXPORT_NAME qkv
    LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/lib/${torch}
    BUILD_RPATH "${folder}/lib"
    INSTALL_RPATH "${rpath}")
  install(TARGETS ${target} EXPORT qkv-${torch} LIBRARY DESTINATION lib/${torch})
  install(EXPORT qkv-${torch} NAMESPACE qkv:: FILE qkvTargets-${torch}.cmake
          DESTINATION share/cmake/qkv)
endfunction()

# The target of the first torch is called qkv, and the tests are linked with it.
set(operators)
foreach(folder IN LISTS torches)
  list(LENGTH operators number)
  set(target qkv)
  if(number GREATER 0)
    set(target qkv_${number})
  endif()
  qkv_add_operators(${target} "${folder}")
  list(APPEND operators ${target})
endforeach()
add_custom_target(operators DEPENDS ${operators})

include(CMakePackageConfigHelpers)
install(DIRECTORY torch_ext/include/ DESTINATION include)
configure_package_config_file(cmake/qkvConfig.cmake.in qkvConfig.cmake
  INSTALL_DESTINATION share/cmake/qkv NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(qkvConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/qkvConfig.cmake ${PROJECT_BINARY_DIR}/qkvConfigVersion.cmake
              cmake/qkvTorch.cmake
        DESTINATION share/cmake/qkv)
