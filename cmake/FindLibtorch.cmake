# SPDX-License-Identifier: Apache-2.0
# Finds libtorch by its headers and libraries: Torch_ROOT or $LIBTORCH (a libtorch zip), the torch of python3
# (a pip wheel), or the system's package. Unlike TorchConfig.cmake it needs neither nvcc nor protobuf nor gflags.
#
# Defines Libtorch::Libtorch, Libtorch_VERSION, Libtorch_CUDA, Libtorch_LIBRARY_DIR.
set(_roots ${Torch_ROOT} $ENV{Torch_ROOT} $ENV{LIBTORCH})
find_path(Libtorch_INCLUDE_DIR torch/csrc/api/include/torch/version.h HINTS ${_roots} PATH_SUFFIXES include NO_DEFAULT_PATH)
if(NOT Libtorch_INCLUDE_DIR)
  find_path(Libtorch_INCLUDE_DIR torch/csrc/api/include/torch/version.h PATHS /usr/include /usr/local/include)
endif()
if(NOT Libtorch_INCLUDE_DIR)
  execute_process(COMMAND python3 -c "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
                  OUTPUT_VARIABLE _python_torch OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  find_path(Libtorch_INCLUDE_DIR torch/csrc/api/include/torch/version.h HINTS ${_python_torch}/include NO_DEFAULT_PATH)
endif()
get_filename_component(_root "${Libtorch_INCLUDE_DIR}" DIRECTORY)
foreach(_name torch torch_cpu c10 torch_cuda c10_cuda)
  find_library(Libtorch_${_name}_LIBRARY ${_name} HINTS ${_root}/lib NO_DEFAULT_PATH)
  if(_root STREQUAL "/usr" OR _root STREQUAL "/usr/local")
    find_library(Libtorch_${_name}_LIBRARY ${_name})
  endif()
endforeach()
if(Libtorch_INCLUDE_DIR)
  file(STRINGS ${Libtorch_INCLUDE_DIR}/torch/csrc/api/include/torch/version.h _lines REGEX "define TORCH_VERSION_(MAJOR|MINOR|PATCH)")
  if(NOT _lines)  # newer releases keep the numbers in the header-only part
    file(STRINGS ${Libtorch_INCLUDE_DIR}/torch/headeronly/version.h _lines REGEX "define TORCH_VERSION_(MAJOR|MINOR|PATCH)")
  endif()
  string(REGEX REPLACE ".*MAJOR ([0-9]+).*MINOR ([0-9]+).*PATCH ([0-9]+).*" "\\1.\\2.\\3" Libtorch_VERSION "${_lines}")
endif()
get_filename_component(Libtorch_LIBRARY_DIR "${Libtorch_torch_cpu_LIBRARY}" DIRECTORY)
set(Libtorch_CUDA OFF)
if(Libtorch_torch_cuda_LIBRARY)
  set(Libtorch_CUDA ON)
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(Libtorch
  REQUIRED_VARS Libtorch_torch_LIBRARY Libtorch_torch_cpu_LIBRARY Libtorch_c10_LIBRARY Libtorch_INCLUDE_DIR
  VERSION_VAR Libtorch_VERSION
  REASON_FAILURE_MESSAGE "install libtorch-dev, or set Torch_ROOT to an unpacked libtorch, or put a python3 with torch first in PATH")
if(LOCKSTEP_CUDA AND Libtorch_FOUND AND NOT Libtorch_CUDA)
  message(FATAL_ERROR "LOCKSTEP_CUDA is ON but the libtorch in ${_root} has no libtorch_cuda")
endif()

if(Libtorch_FOUND AND NOT TARGET Libtorch::Libtorch)
  add_library(Libtorch::Libtorch INTERFACE IMPORTED)
  set(_includes ${Libtorch_INCLUDE_DIR} ${Libtorch_INCLUDE_DIR}/torch/csrc/api/include)
  set(_links ${Libtorch_torch_cpu_LIBRARY} ${Libtorch_c10_LIBRARY})
  if(Libtorch_CUDA)
    find_package(CUDAToolkit QUIET)
    if(CUDAToolkit_FOUND)
      list(APPEND _includes ${CUDAToolkit_INCLUDE_DIRS})
      list(APPEND _links ${Libtorch_c10_cuda_LIBRARY} ${CUDA_cudart_LIBRARY})
      # The one that libtorch_cuda loads, beside it or in the pip wheel of cuBLAS: two versions in a process do not go together.
      find_library(Libtorch_cublasLt_LIBRARY NAMES cublasLt libcublasLt.so.13 libcublasLt.so.12
                   HINTS ${_root}/lib ${_root}/../nvidia/cu13/lib ${_root}/../nvidia/cublas/lib NO_DEFAULT_PATH)
      if(NOT Libtorch_cublasLt_LIBRARY)
        find_library(Libtorch_cublasLt_LIBRARY cublasLt HINTS ${CUDAToolkit_LIBRARY_DIR})
      endif()
      if(Libtorch_cublasLt_LIBRARY)
        list(APPEND _links ${Libtorch_cublasLt_LIBRARY})
      endif()
    endif()
    # Nothing refers to libtorch_cuda by name; without this the linker drops it and CUDA is "not available".
    list(APPEND _links "-Wl,--no-as-needed,${Libtorch_torch_cuda_LIBRARY},--as-needed")
  endif()
  list(APPEND _links "-Wl,--no-as-needed,${Libtorch_torch_LIBRARY},--as-needed")
  target_include_directories(Libtorch::Libtorch SYSTEM INTERFACE ${_includes})
  target_link_libraries(Libtorch::Libtorch INTERFACE ${_links})
  target_compile_definitions(Libtorch::Libtorch INTERFACE USE_DISTRIBUTED USE_C10D_GLOO)
endif()
mark_as_advanced(Libtorch_INCLUDE_DIR Libtorch_cublasLt_LIBRARY)
