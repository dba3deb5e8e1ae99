# cmake --install: static libraries, public headers, a CMake package (find_package(ebb), targets ebb::ebb, ebb::engine,
# ...), ebb.pc, the documentation, the examples that it names and the licence. The package and ebb.pc name the libraries that a program must
# find before it can link Ebb. These names are read from the targets, so none is missing. The package and ebb.pc are relocatable:
# every path inside is relative to the file.
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

# Each target comes after those that it needs.
set(ebb_installed_targets base config sharding trace device kernels comm optim offload engine checkpoint)

# The libraries by their names for find_package, for pkg-config and for the linker.
set(ebb_packages Threads)
set(ebb_pc_requires "")
set(ebb_pc_libs "")
foreach(name ${ebb_installed_targets})
  list(PREPEND ebb_pc_libs -lebb_${name})
endforeach()
list(APPEND ebb_pc_libs -pthread)
foreach(name ${ebb_installed_targets})
  get_target_property(libraries ebb_${name} LINK_LIBRARIES)
  foreach(library ${libraries})
    # "::@": a marker that CMake puts around libraries from another folder.
    if(library MATCHES "^(ebb(::|_)|::@)" OR library STREQUAL "Threads::Threads")
      continue()
    elseif(library MATCHES "^absl::(.+)$")
      list(APPEND ebb_packages absl)
      list(APPEND ebb_pc_requires absl_${CMAKE_MATCH_1})
    elseif(library STREQUAL "hwy::hwy")
      list(APPEND ebb_packages hwy)
      list(APPEND ebb_pc_requires libhwy)
    elseif(library STREQUAL "spdlog::spdlog")
      list(APPEND ebb_packages spdlog)
      list(APPEND ebb_pc_requires spdlog)
    elseif(library STREQUAL "nlohmann_json::nlohmann_json")
      list(APPEND ebb_packages nlohmann_json)  # headers only: nothing to link
    elseif(library STREQUAL "liburing::liburing")
      list(APPEND ebb_packages liburing)
      list(APPEND ebb_pc_requires liburing)
    elseif(library STREQUAL "CUDA::cudart_static")
      list(APPEND ebb_packages CUDAToolkit)
      list(APPEND ebb_pc_libs -L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -lrt -ldl)
    elseif(library MATCHES "^[a-z]+$")
      list(APPEND ebb_pc_libs -l${library})
    else()
      message(FATAL_ERROR "ebb_${name} links ${library}: say in cmake/EbbInstall.cmake which package has it and what ebb.pc "
                          "calls it")
    endif()
  endforeach()
endforeach()
foreach(list ebb_packages ebb_pc_requires ebb_pc_libs)
  list(REMOVE_DUPLICATES ${list})
endforeach()
list(JOIN ebb_pc_requires " " ebb_pc_requires)
list(JOIN ebb_pc_libs " " ebb_pc_libs)

set(ebb_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/ebb)
set(ebb_pc_dir ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
file(RELATIVE_PATH ebb_pc_prefix /prefix/${ebb_pc_dir} /prefix)
string(REGEX REPLACE "/$" "" ebb_pc_prefix ${ebb_pc_prefix})
set(ebb_generated_dir ${PROJECT_BINARY_DIR}/cmake)
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/ebbConfig.cmake.in ${ebb_generated_dir}/ebbConfig.cmake
  INSTALL_DESTINATION ${ebb_package_dir} NO_SET_AND_CHECK_MACRO)
# Until 1.0 a new minor version may change the interface.
write_basic_package_version_file(${ebb_generated_dir}/ebbConfigVersion.cmake COMPATIBILITY SameMinorVersion)
configure_file(${PROJECT_SOURCE_DIR}/cmake/ebb.pc.in ${ebb_generated_dir}/ebb.pc @ONLY)

foreach(name ${ebb_installed_targets})
  set_target_properties(ebb_${name} PROPERTIES EXPORT_NAME ${name})
  install(TARGETS ebb_${name} EXPORT ebb ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT development
    INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
endforeach()
install(TARGETS ebb EXPORT ebb)
# Builds what the component "development" installs, without tests and examples.
add_custom_target(ebb_libraries)
foreach(name ${ebb_installed_targets})
  add_dependencies(ebb_libraries ebb_${name})
endforeach()
install(EXPORT ebb FILE ebbTargets.cmake NAMESPACE ebb:: DESTINATION ${ebb_package_dir} COMPONENT development)
install(
  FILES ${ebb_generated_dir}/ebbConfig.cmake ${ebb_generated_dir}/ebbConfigVersion.cmake
        ${PROJECT_SOURCE_DIR}/cmake/Findhwy.cmake ${PROJECT_SOURCE_DIR}/cmake/Findliburing.cmake
  DESTINATION ${ebb_package_dir} COMPONENT development)
install(FILES ${ebb_generated_dir}/ebb.pc DESTINATION ${ebb_pc_dir} COMPONENT development)
# The include folder has links into the tree. Their targets are installed.
foreach(header ${ebb_public_headers})
  cmake_path(GET header PARENT_PATH folder)
  file(REAL_PATH ${EBB_INCLUDE_DIR}/ebb/${header} file)
  install(FILES ${file} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/ebb/${folder} COMPONENT development)
endforeach()
install(FILES ${PROJECT_SOURCE_DIR}/runtime/config/ebb-config.schema.json DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/ebb
  COMPONENT development)
# In one folder, so that the links between them work.
install(FILES ${PROJECT_SOURCE_DIR}/README.md ${PROJECT_SOURCE_DIR}/ARCHITECTURE.md
  DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT development)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/docs DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT development)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/examples DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT development
  USE_SOURCE_PERMISSIONS PATTERN __pycache__ EXCLUDE)
set(ebb_components development)
if(TARGET gpt)
  install(TARGETS gpt RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT trainer)
  list(APPEND ebb_components trainer)
endif()
if(TARGET ebb-checkpoint)
  install(TARGETS ebb-checkpoint ebb-plan RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT tools)
  list(APPEND ebb_components tools)
endif()
if(TARGET ebb_c)
  install(TARGETS ebb_c LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT c)
  install(FILES ${PROJECT_SOURCE_DIR}/runtime/c/ebb.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/ebb/runtime/c COMPONENT c)
  list(APPEND ebb_components c)
endif()
foreach(component ${ebb_components})
  install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT ${component})
endforeach()
