# SPDX-License-Identifier: Apache-2.0
# How every target is built: flags, dependencies, and lockstep_layer().
include(CMakePackageConfigHelpers)

find_program(CCACHE ccache)
if(CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # ccache refuses to compile where it cannot write its cache, as for a user without a home.
  file(WRITE ${PROJECT_BINARY_DIR}/CMakeFiles/ccache.cpp "")
  execute_process(COMMAND ${CCACHE} ${CMAKE_CXX_COMPILER} -c ccache.cpp WORKING_DIRECTORY ${PROJECT_BINARY_DIR}/CMakeFiles
                  RESULT_VARIABLE ccache_failed OUTPUT_QUIET ERROR_QUIET)
endif()
if(CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER AND NOT ccache_failed)
  # ccache takes precompiled headers only with these allowances.
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env
      CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime ${CCACHE})
endif()

# Sources of a target are compiled some at a time, as one: most of the time that a source takes is torch's templates, which every
# compilation instantiates again. -DCMAKE_UNITY_BUILD=OFF compiles each by itself: slower in all, quicker after a change of one.
if(NOT DEFINED CMAKE_UNITY_BUILD)
  set(CMAKE_UNITY_BUILD ON)
endif()
set(CMAKE_UNITY_BUILD_BATCH_SIZE 48)

find_package(Threads REQUIRED)
find_package(spdlog REQUIRED)
find_package(fmt REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(Lz4 REQUIRED)
find_package(Hwloc REQUIRED)
find_package(OpenSSL QUIET COMPONENTS Crypto)
find_package(CLI11 QUIET)
find_path(CLI11_INCLUDE_DIR CLI/CLI.hpp REQUIRED)

if(LOCKSTEP_TESTS)
  find_package(GTest QUIET)
  find_program(PYTHON3 python3)
  if(NOT GTest_FOUND OR NOT PYTHON3)
    message(WARNING "Tests and examples are not built: they need GoogleTest (libgtest-dev, libgmock-dev) and python3")
    set(LOCKSTEP_TESTS OFF)
  endif()
endif()

# Private flags: nothing here reaches a program that links Lockstep.
add_library(lockstep_flags INTERFACE)
target_compile_options(lockstep_flags INTERFACE -Wall -Wextra -Winvalid-pch)
# Torch's macros put __FILE__ into what is installed; where it was built is nobody's business.
target_compile_options(lockstep_flags INTERFACE -fmacro-prefix-map=${PROJECT_SOURCE_DIR}/=)
if(CMAKE_UNITY_BUILD AND CMAKE_CXX_COMPILER_ID STREQUAL GNU)
  target_compile_options(lockstep_flags INTERFACE -Wno-subobject-linkage)  # it takes the sources for headers
  # Collecting garbage less often saves a seventh of the time for a fifth more memory.
  target_compile_options(lockstep_flags INTERFACE "SHELL:--param ggc-min-expand=400" "SHELL:--param ggc-min-heapsize=1000000")
endif()
if(LOCKSTEP_WERROR)
  target_compile_options(lockstep_flags INTERFACE -Werror)
endif()
find_program(MOLD mold)
if(MOLD AND CMAKE_CXX_COMPILER_ID STREQUAL GNU AND CMAKE_CXX_COMPILER_VERSION VERSION_GREATER_EQUAL 12.1)
  target_link_options(lockstep_flags INTERFACE -fuse-ld=mold)  # a tenth of the time
endif()
if(LOCKSTEP_SANITIZE)
  # GCC 13 takes copies in fmt's headers for writes out of bounds when they are instrumented.
  target_compile_options(lockstep_flags INTERFACE -fsanitize=${LOCKSTEP_SANITIZE} -fno-omit-frame-pointer -Wno-array-bounds)
  # The thread sanitizer does not follow fences. flight/flight.cpp has one, against writers in other processes.
  if(LOCKSTEP_SANITIZE STREQUAL "thread" AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    target_compile_options(lockstep_flags INTERFACE -Wno-tsan)
  endif()
  target_link_options(lockstep_flags INTERFACE -fsanitize=${LOCKSTEP_SANITIZE})
endif()

if(LOCKSTEP_TORCH)
  find_package(Libtorch)
  if(NOT Libtorch_FOUND)
    message(FATAL_ERROR "Lockstep needs libtorch. Install libtorch-dev, or set Torch_ROOT to an unpacked libtorch, or put a python3 with "
                        "torch first in PATH. LOCKSTEP_TORCH=OFF builds the half that does without: the launcher and the layouts.")
  endif()
  # c10d's header of Gloo groups includes Gloo's, which wheels leave out.
  find_path(GLOO_INCLUDE_DIR gloo/context.h HINTS ${Libtorch_INCLUDE_DIR})
  if(NOT GLOO_INCLUDE_DIR)
    set(GLOO_INCLUDE_DIR ${PROJECT_SOURCE_DIR}/lockstep/comm/backends/gloo/declarations)
  endif()
  find_package(MPI COMPONENTS CXX QUIET)
  # Kernels of our own need nvcc. It may lie outside PATH, where only FindCUDAToolkit looks.
  set(LOCKSTEP_NVCC OFF)
  if(Libtorch_CUDA AND CUDAToolkit_FOUND)
    if(NOT DEFINED ENV{CUDACXX} AND CUDAToolkit_NVCC_EXECUTABLE)
      set(ENV{CUDACXX} ${CUDAToolkit_NVCC_EXECUTABLE})
    endif()
    if(NOT CMAKE_CUDA_ARCHITECTURES)
      set(CMAKE_CUDA_ARCHITECTURES all-major)
    endif()
    set(CMAKE_CUDA_RUNTIME_LIBRARY Shared)  # the one that libtorch uses
    include(CheckLanguage)
    check_language(CUDA)
    if(CMAKE_CUDA_COMPILER AND Libtorch_cublasLt_LIBRARY)
      enable_language(CUDA)
      set(LOCKSTEP_NVCC ON)
    endif()
  endif()
  if(Libtorch_CUDA AND NOT LOCKSTEP_NVCC)
    message(STATUS "Lockstep: no nvcc, or no cuBLASLt: no kernels of our own for CUDA; random numbers are drawn on the CPU and copied, the rest is done by torch's operators: slower")
  endif()
  message(STATUS "Lockstep: libtorch ${Libtorch_VERSION} (${Libtorch_LIBRARY_DIR}), MPI ${MPI_CXX_FOUND}, CUDA ${Libtorch_CUDA}")
endif()

# -O1 for what decides and prints, and for what calls torch's operators: their time is in kernels, which are sources of their own with
# options of their own. It compiles in three quarters of the time. COLD says so of a layer without torch.
set(lockstep_cold $<$<CONFIG:Release,RelWithDebInfo>:-O1>)

# lockstep_layer(name SOURCES ... HEADERS ... [DEPENDS ...] [PRIVATE ...] [TORCH] [COLD])
# One folder, one namespace, one target lockstep::name. HEADERS are what is installed; DEPENDS is public.
function(lockstep_layer name)
  cmake_parse_arguments(ARG "TORCH;COLD" "" "SOURCES;HEADERS;DEPENDS;PRIVATE" ${ARGN})
  set(target lockstep_${name})
  add_library(${target} STATIC ${ARG_SOURCES})
  add_library(lockstep::${name} ALIAS ${target})
  target_compile_features(${target} PUBLIC cxx_std_20)
  target_link_libraries(${target} PUBLIC ${ARG_DEPENDS} PRIVATE $<BUILD_INTERFACE:lockstep_flags> ${ARG_PRIVATE})
  if(ARG_TORCH)
    target_link_libraries(${target} PUBLIC Libtorch::Libtorch)
    lockstep_torch_pch(${target})
  endif()
  if(ARG_COLD)
    target_compile_options(${target} PRIVATE ${lockstep_cold})
  endif()
  set_target_properties(${target} PROPERTIES EXPORT_NAME ${name} VERIFY_INTERFACE_HEADER_SETS ON)
  target_sources(${target} PUBLIC FILE_SET HEADERS
    BASE_DIRS ${PROJECT_SOURCE_DIR} FILES ${ARG_HEADERS})
  set_property(GLOBAL APPEND PROPERTY LOCKSTEP_LAYERS ${name})
  install(TARGETS ${target} EXPORT LockstepTargets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
          FILE_SET HEADERS DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
endfunction()

# lockstep_text_of(variable files...): their texts, one after the other; CMake runs again when one of them changes.
function(lockstep_text_of variable)
  set(text "")
  foreach(file IN LISTS ARGN)
    file(READ ${file} part)
    string(REGEX REPLACE "\n//# sourceMappingURL=[^\n]*" "" part "${part}")
    string(APPEND text "${part}\n")
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${file})
  endforeach()
  set(${variable} "${text}" PARENT_SCOPE)
endfunction()

# lockstep_vector_kernels(layer source flags...): loops that become vector instructions. On x86 they are built once more for
# processors with AVX2, in a namespace of their own; the layer chooses when it runs.
function(lockstep_vector_kernels layer source)
  set_source_files_properties(${source} PROPERTIES COMPILE_OPTIONS "${ARGN}" SKIP_PRECOMPILE_HEADERS ON)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    get_filename_component(name ${source} NAME_WE)
    set(target lockstep_${layer}_${name}_v3)
    add_library(${target} OBJECT ${source})
    target_compile_definitions(${target} PRIVATE LOCKSTEP_ISA=x86_v3)
    target_compile_options(${target} PRIVATE -march=x86-64-v3)
    target_compile_features(${target} PRIVATE cxx_std_20)
    target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR})
    target_link_libraries(${target} PRIVATE lockstep_flags)
    target_sources(lockstep_${layer} PRIVATE $<TARGET_OBJECTS:${target}>)
  endif()
endfunction()

# lockstep_cuda_kernels(layer sources...): what nvcc compiles of a layer, as the object library lockstep_<layer>_cuda.
function(lockstep_cuda_kernels layer)
  add_library(lockstep_${layer}_cuda OBJECT ${ARGN})
  target_compile_options(lockstep_${layer}_cuda PRIVATE -std=c++20)  # CMake 3.25 does not know that nvcc 12 has it
  target_include_directories(lockstep_${layer}_cuda PRIVATE ${PROJECT_SOURCE_DIR})
  set_target_properties(lockstep_${layer}_cuda PROPERTIES UNITY_BUILD OFF)  # nvcc takes longest, one file after the other
endfunction()

# One precompiled header serves the library. GCC 13 takes it only with the options that it was made with.
function(lockstep_torch_pch target)
  target_compile_options(${target} PRIVATE ${lockstep_cold})
  if(NOT TARGET lockstep_torch_headers)
    file(CONFIGURE OUTPUT lockstep_torch_headers.cpp CONTENT "")
    add_library(lockstep_torch_headers OBJECT ${CMAKE_CURRENT_BINARY_DIR}/lockstep_torch_headers.cpp)
    target_compile_features(lockstep_torch_headers PRIVATE cxx_std_20)
    target_link_libraries(lockstep_torch_headers PRIVATE Libtorch::Libtorch lockstep_flags)
    target_compile_options(lockstep_torch_headers PRIVATE ${lockstep_cold})
    target_precompile_headers(lockstep_torch_headers PRIVATE <ATen/ATen.h>)
  endif()
  target_precompile_headers(${target} REUSE_FROM lockstep_torch_headers)
endfunction()

# lockstep_pch(target name headers...): one precompiled header serves every target that asks for this name. The first makes it.
function(lockstep_pch target name)
  get_property(first GLOBAL PROPERTY LOCKSTEP_PCH_${name})
  if(first)
    target_precompile_headers(${target} REUSE_FROM ${first})
  else()
    set_property(GLOBAL PROPERTY LOCKSTEP_PCH_${name} ${target})
    target_precompile_headers(${target} PRIVATE ${ARGN})
  endif()
endfunction()

# Tests are not optimised: what they call is, and compiling them is most of the time that a build takes. PRESET=dev has their lines
# for debuggers.
function(lockstep_test_pch target)
  target_compile_options(${target} PRIVATE -O0 $<$<CONFIG:RelWithDebInfo>:-g0>)
  target_compile_definitions(${target} PRIVATE GTEST_HAS_PTHREAD=1)  # as these headers are precompiled
  set(gtest <gmock/gmock.h> <gtest/gtest.h> ${PROJECT_SOURCE_DIR}/tests/support/gmock_once.h)
  if("TORCH" IN_LIST ARGN)
    # Not torch/torch.h: every program would instantiate the templates of all its modules again.
    set(torch <torch/autograd.h> <torch/types.h> <torch/utils.h> <torch/optim/adamw.h> <torch/optim/sgd.h>)
    foreach(module activation batchnorm embedding linear normalization container/sequential)
      list(APPEND torch <torch/nn/modules/${module}.h>)
    endforeach()
    lockstep_pch(${target} torch_tests ${torch} ${gtest})
  else()
    lockstep_pch(${target} tests ${gtest} <algorithm> <filesystem> <fstream> <nlohmann/json.hpp> <set> <span> <thread>)
  endif()
endfunction()

# lockstep_executable(name SOURCES ... LINK ... [TORCH])
function(lockstep_executable name)
  cmake_parse_arguments(ARG "TORCH" "" "SOURCES;LINK" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  target_compile_features(${name} PRIVATE cxx_std_20)
  target_link_libraries(${name} PRIVATE ${ARG_LINK} lockstep_flags)
  # Where it is installed it finds a libtorch outside the system's folders (a pip wheel) as it did when it was linked.
  set_target_properties(${name} PROPERTIES INSTALL_RPATH_USE_LINK_PATH ON)
  if(ARG_TORCH)
    lockstep_torch_pch(${name})
  endif()
endfunction()
