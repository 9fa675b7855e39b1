# SPDX-License-Identifier: Apache-2.0
# What `cmake --install` leaves for other projects: the umbrella target, find_package(Lockstep) and pkg-config.
get_property(layers GLOBAL PROPERTY LOCKSTEP_LAYERS)

# lockstep::lockstep is all layers of this build.
add_library(lockstep_all INTERFACE)
add_library(lockstep::lockstep ALIAS lockstep_all)
set_target_properties(lockstep_all PROPERTIES EXPORT_NAME lockstep)
list(TRANSFORM layers PREPEND lockstep:: OUTPUT_VARIABLE targets)
target_link_libraries(lockstep_all INTERFACE ${targets})
# It installs lockstep.h, which includes what the layers install. Installed, that header finds out by itself whether there is torch;
# in the tree, where all headers are, it must be told.
target_sources(lockstep_all INTERFACE FILE_SET HEADERS BASE_DIRS ${PROJECT_SOURCE_DIR} FILES ${PROJECT_SOURCE_DIR}/lockstep/lockstep.h)
if(NOT LOCKSTEP_TORCH)
  target_compile_definitions(lockstep_all INTERFACE $<BUILD_INTERFACE:LOCKSTEP_WITHOUT_TORCH>)
endif()
set_target_properties(lockstep_all PROPERTIES VERIFY_INTERFACE_HEADER_SETS ON)
install(TARGETS lockstep_all EXPORT LockstepTargets FILE_SET HEADERS DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})

# ---- find_package(Lockstep) ----

set(config_dir ${CMAKE_INSTALL_LIBDIR}/cmake/Lockstep)
set(generated ${PROJECT_BINARY_DIR}/generated)
if(LOCKSTEP_TORCH)
  get_filename_component(LOCKSTEP_TORCH_ROOT ${Libtorch_INCLUDE_DIR} DIRECTORY)
  if(MPI_CXX_FOUND)
    set(LOCKSTEP_MPI ON)
  endif()
endif()
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/LockstepConfig.cmake.in ${generated}/LockstepConfig.cmake
  INSTALL_DESTINATION ${config_dir} NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(${generated}/LockstepConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(EXPORT LockstepTargets NAMESPACE lockstep:: DESTINATION ${config_dir})
install(FILES ${generated}/LockstepConfig.cmake ${generated}/LockstepConfigVersion.cmake ${CMAKE_CURRENT_LIST_DIR}/FindLibtorch.cmake
        ${CMAKE_CURRENT_LIST_DIR}/FindLz4.cmake ${CMAKE_CURRENT_LIST_DIR}/FindHwloc.cmake
        DESTINATION ${config_dir})

# ---- pkg-config ----

# The libraries are static, so users link everything by name: our layers, the lowest last, then what they use.
list(REVERSE layers)
list(TRANSFORM layers PREPEND -llockstep_)
set(pc_libs -L\${libdir} ${layers})
set(pc_cflags -I\${includedir})
if(LOCKSTEP_TORCH)
  get_target_property(includes Libtorch::Libtorch INTERFACE_INCLUDE_DIRECTORIES)
  list(REMOVE_ITEM includes ${CMAKE_CXX_IMPLICIT_INCLUDE_DIRECTORIES})
  list(TRANSFORM includes PREPEND -I)
  get_target_property(definitions Libtorch::Libtorch INTERFACE_COMPILE_DEFINITIONS)
  list(TRANSFORM definitions PREPEND -D)
  list(APPEND pc_cflags ${includes} ${definitions})
  get_target_property(libraries Libtorch::Libtorch INTERFACE_LINK_LIBRARIES)
  if(LOCKSTEP_MPI)
    list(APPEND libraries ${MPI_CXX_LIBRARIES})
  endif()
  list(APPEND pc_libs ${libraries})
  if(Libtorch_cublasLt_LIBRARY)
    get_filename_component(cublas_dir ${Libtorch_cublasLt_LIBRARY} DIRECTORY)
  endif()
  foreach(dir ${Libtorch_LIBRARY_DIR} ${cublas_dir})
    if(NOT dir IN_LIST CMAKE_CXX_IMPLICIT_LINK_DIRECTORIES)
      list(APPEND pc_libs -Wl,-rpath,${dir})
    endif()
  endforeach()
endif()
if(OPENSSL_FOUND)
  list(APPEND pc_libs ${OPENSSL_CRYPTO_LIBRARY})
endif()
list(APPEND pc_libs ${Lz4_LIBRARY} ${Hwloc_LIBRARY} -pthread)
string(REPLACE ";" " " LOCKSTEP_PC_CFLAGS "${pc_cflags}")
string(REPLACE ";" " " LOCKSTEP_PC_LIBS "${pc_libs}")
file(RELATIVE_PATH LOCKSTEP_PC_PREFIX /prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig /prefix)
string(REGEX REPLACE "/$" "" LOCKSTEP_PC_PREFIX ${LOCKSTEP_PC_PREFIX})
configure_file(${CMAKE_CURRENT_LIST_DIR}/lockstep.pc.in ${generated}/lockstep.pc @ONLY)
install(FILES ${generated}/lockstep.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
