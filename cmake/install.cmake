# Install and export: headers, the library, the command, and a package that find_package finds.
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/longspan)
set(LONGSPAN_NCCL_VERSION ${NCCL_VERSION})
if(NOT DEFINED BUILD_SHARED_LIBS)
  set(BUILD_SHARED_LIBS OFF)
endif()

# longspan_install(name target...): one file of targets, for one component of find_package.
function(longspan_install name)
  install(TARGETS ${ARGN} EXPORT ${name}Targets FILE_SET HEADERS
          OBJECTS DESTINATION ${CMAKE_INSTALL_LIBDIR}/longspan)
  install(EXPORT ${name}Targets NAMESPACE longspan:: DESTINATION ${package_dir})
endfunction()
longspan_install(longspan longspan)
foreach(name mpi nccl)
  if(TARGET longspan_${name})
    longspan_install(longspan_${name} longspan_${name} longspan_${name}_registration)
  endif()
endforeach()
configure_package_config_file(cmake/longspanConfig.cmake.in generated/longspanConfig.cmake
                              INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(generated/longspanConfigVersion.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/generated/longspanConfig.cmake
              ${PROJECT_BINARY_DIR}/generated/longspanConfigVersion.cmake
        DESTINATION ${package_dir})
if(LONGSPAN_HAVE_CUDA)
  install(FILES ${PROJECT_SOURCE_DIR}/cmake/FindNCCL.cmake DESTINATION ${package_dir})
endif()

if(TARGET longspan_command)
  set_target_properties(longspan_command PROPERTIES
                        INSTALL_RPATH "$ORIGIN/../${CMAKE_INSTALL_LIBDIR}")
  install(TARGETS longspan_command)
endif()
