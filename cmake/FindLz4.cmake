# SPDX-License-Identifier: Apache-2.0
# Finds liblz4 by its header and library: distributions differ in whether they have a CMake package for it. Defines Lz4::Lz4.
find_path(Lz4_INCLUDE_DIR lz4.h)
find_library(Lz4_LIBRARY lz4)

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(Lz4 REQUIRED_VARS Lz4_LIBRARY Lz4_INCLUDE_DIR REASON_FAILURE_MESSAGE "install liblz4-dev")

if(Lz4_FOUND AND NOT TARGET Lz4::Lz4)
  add_library(Lz4::Lz4 UNKNOWN IMPORTED)
  set_target_properties(Lz4::Lz4 PROPERTIES IMPORTED_LOCATION ${Lz4_LIBRARY} INTERFACE_INCLUDE_DIRECTORIES ${Lz4_INCLUDE_DIR})
endif()
mark_as_advanced(Lz4_INCLUDE_DIR Lz4_LIBRARY)
