# qkv_find_torch(): the target qkv::torch, which is torch's headers and the two of its libraries
# that qkv needs, libtorch_cpu and libc10. In place of find_package(Torch), which stops without a
# CUDA toolkit if torch was built with CUDA, as pip's is, though nothing here needs one.
#
# Also used by find_package(qkv), where it is installed beside qkvConfig.cmake.

# Sets `result` to the folder of the torch that `folder` stands for, or to "". `folder` may be the
# Python package or LibTorch itself, torch.utils.cmake_prefix_path, or the folder of
# TorchConfig.cmake.
function(_qkv_torch_at folder result)
  set(${result} "" PARENT_SCOPE)
  foreach(up "" "/../.." "/../../..")
    if(folder AND EXISTS "${folder}${up}/include/torch/headeronly/version.h")
      get_filename_component(found "${folder}${up}" ABSOLUTE)
      set(${result} "${found}" PARENT_SCOPE)
      return()
    endif()
  endforeach()
endfunction()

# Sets `result` to the version that torch's headers have: major.minor.patch.
function(_qkv_torch_version torch result)
  file(STRINGS "${torch}/include/torch/headeronly/version.h" lines
       REGEX "define TORCH_VERSION_(MAJOR|MINOR|PATCH) [0-9]+")
  string(REGEX MATCHALL "[0-9]+" numbers "${lines}")
  list(JOIN numbers "." version)
  set(${result} "${version}" PARENT_SCOPE)
endfunction()

# Adds the imported target `name` for the torch in `folder`, unless there is a target of that name.
function(_qkv_add_torch name folder)
  if(TARGET ${name})
    return()
  endif()
  add_library(${name} INTERFACE IMPORTED)
  target_include_directories(${name} INTERFACE
    "${folder}/include" "${folder}/include/torch/csrc/api/include")
  target_link_libraries(${name} INTERFACE "${folder}/lib/libtorch_cpu.so" "${folder}/lib/libc10.so")
  target_compile_features(${name} INTERFACE cxx_std_20)  # which torch's headers need
endfunction()

# Finds the first torch among the one that find_package(Torch) has found, the folders that the user
# has named (-DTorch_DIR, -DTorch_ROOT, CMAKE_PREFIX_PATH, the last two also in the environment),
# and the arguments. Sets QKV_TORCH_FOLDER and QKV_TORCH_VERSION, and leaves both empty if there is
# none.
macro(qkv_find_torch)
  set(QKV_TORCH_FOLDER "")
  set(QKV_TORCH_VERSION "")
  string(REPLACE ":" ";" _qkv_prefixes "$ENV{CMAKE_PREFIX_PATH}")
  foreach(_qkv_folder "${TORCH_INSTALL_PREFIX}" "${Torch_DIR}" "${Torch_ROOT}" "$ENV{Torch_ROOT}"
          ${CMAKE_PREFIX_PATH} ${_qkv_prefixes} ${ARGN})
    _qkv_torch_at("${_qkv_folder}" QKV_TORCH_FOLDER)
    if(QKV_TORCH_FOLDER)
      break()
    endif()
  endforeach()
  if(QKV_TORCH_FOLDER)
    _qkv_torch_version("${QKV_TORCH_FOLDER}" QKV_TORCH_VERSION)
    _qkv_add_torch(qkv::torch "${QKV_TORCH_FOLDER}")
  endif()
endmacro()
