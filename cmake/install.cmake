# Install and export: headers, the library, the command, and a package that find_package finds.
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/longspan)
set(LONGSPAN_NCCL_VERSION ${NCCL_VERSION})
if(NOT DEFINED BUILD_SHARED_LIBS)
  set(BUILD_SHARED_LIBS OFF)
endif()

install(TARGETS longspan EXPORT longspanTargets FILE_SET HEADERS)
install(EXPORT longspanTargets NAMESPACE longspan:: DESTINATION ${package_dir})
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
