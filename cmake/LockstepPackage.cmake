# SPDX-License-Identifier: Apache-2.0
# What `make package` builds: one Debian package, `lockstep`, with the command, headers, static libraries, CMake and pkg-config
# files, the license and the documents.
if(NOT PROJECT_IS_TOP_LEVEL)
  return()  # a project that contains Lockstep packages itself
endif()

set(doc_dir ${CMAKE_INSTALL_DATAROOTDIR}/doc/lockstep)
install(FILES README.md CHANGELOG.md CONTRIBUTING.md SECURITY.md LICENSE DESTINATION ${doc_dir})
install(FILES LICENSE DESTINATION ${doc_dir} RENAME copyright)  # where Debian looks for it
install(DIRECTORY docs examples DESTINATION ${doc_dir} PATTERN __pycache__ EXCLUDE)

# Manual pages and completion scripts, which the command itself prints.
if(NOT CMAKE_CROSSCOMPILING)
  set(share ${PROJECT_BINARY_DIR}/generated/share)
  add_custom_command(OUTPUT ${share}/man/man1/lockstep.1
    COMMAND ${CMAKE_COMMAND} -DLOCKSTEP=$<TARGET_FILE:lockstep> -DVERSION=${PROJECT_VERSION} -DFOLDER=${share}
            -P ${CMAKE_CURRENT_LIST_DIR}/manual_pages.cmake
    DEPENDS lockstep ${CMAKE_CURRENT_LIST_DIR}/manual_pages.cmake VERBATIM)
  add_custom_target(manual ALL DEPENDS ${share}/man/man1/lockstep.1)
  add_dependencies(commands manual)
  install(DIRECTORY ${share}/ DESTINATION ${CMAKE_INSTALL_DATAROOTDIR})
endif()

# A package can depend on Debian's libtorch, but not on one in a folder of this machine. Without these settings there is no
# CPackConfig.cmake, and `make package` says so.
if(LOCKSTEP_TORCH AND NOT Libtorch_LIBRARY_DIR IN_LIST CMAKE_CXX_IMPLICIT_LINK_DIRECTORIES)
  return()
endif()

set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME lockstep)
set(CPACK_PACKAGE_VERSION ${PROJECT_VERSION})
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY ${PROJECT_DESCRIPTION})
set(CPACK_PACKAGE_DESCRIPTION
"Lockstep trains models over several processes: data, tensor and pipeline
parallelism, sharded training, offload, checkpoints, collectives and a
launcher. The package has the lockstep command and a static C++20 library.")
set(CPACK_PACKAGE_CONTACT "The Lockstep maintainers")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_RESOURCE_FILE_LICENSE ${PROJECT_SOURCE_DIR}/LICENSE)
set(CPACK_VERBATIM_VARIABLES ON)
set(CPACK_MONOLITHIC_INSTALL ON)

# strip(1) for programs; archives keep their symbols and lose their debug information, which names folders of this machine.
set(CPACK_STRIP_FILES ON)
set(CPACK_PRE_BUILD_SCRIPTS ${CMAKE_CURRENT_LIST_DIR}/strip_archives.cmake)

set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION science)
# Depends is what the programs are linked with, by dpkg-shlibdeps: enough to run them. Compiling against the package also takes
# a compiler and the development packages that LockstepConfig.cmake and lockstep.pc ask for. Those are Recommends: apt installs them
# by default, and `apt-get install --no-install-recommends` leaves them out on a machine that only runs jobs. One package serves both
# uses, so that the command, the headers and the libraries always have the same version.
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(recommends g++ make cmake pkg-config libspdlog-dev libfmt-dev liblz4-dev libhwloc-dev)
if(LOCKSTEP_TORCH)
  list(APPEND recommends libtorch-dev libopenblas0-openmp)  # the reference BLAS is 12 times slower
endif()
if(LOCKSTEP_MPI)
  list(APPEND recommends libopenmpi-dev openmpi-bin)
endif()
if(OPENSSL_FOUND)
  list(APPEND recommends libssl-dev)
endif()
string(REPLACE ";" ", " CPACK_DEBIAN_PACKAGE_RECOMMENDS "${recommends}")

include(CPack)
