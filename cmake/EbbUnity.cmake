# Parsing the standard library, absl, a JSON library and GoogleTest anew for each file is two thirds of a build from nothing.
# Where EBB_UNITY is on, libraries are compiled in groups of files, and tests, which are one file a program, with headers that
# are precompiled once. A compiler cache saves more: it knows a file whatever tree it is in, and a group only if no file of it
# has changed. So with one it is off.
#
# Every file still includes what it uses, which builds with a cache see to, and names in the unnamed namespaces of one library
# differ, which builds without one see to.
if(EBB_CCACHE)
  set(without_cache OFF)
else()
  set(without_cache ON)
endif()
option(EBB_UNITY "Compile libraries in groups of files, and tests with precompiled headers" ${without_cache})

# ebb_unity(TARGET): TARGET, a library, is compiled in groups of files.
function(ebb_unity target)
  if(EBB_UNITY)
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 24)
    # In a group no file is the main one, which alone may have such members.
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-subobject-linkage>)
  endif()
endfunction()

# Files that Highway's foreach_target.h includes again by their own name, for each instruction set, are compiled alone.
function(ebb_highway_sources)
  set_source_files_properties(${ARGN} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
endfunction()

# For the folder of the tests, whose flags differ from the libraries'.
macro(ebb_precompile_for_tests)
  if(EBB_UNITY)
    set(ebb_precompiled_source ${PROJECT_BINARY_DIR}/precompiled.cc)
    if(NOT EXISTS ${ebb_precompiled_source})
      file(WRITE ${ebb_precompiled_source} "")
    endif()
    # As libraries are compiled: what is precompiled for a program's own code cannot serve objects of several programs.
    add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fPIC>)
    add_library(ebb_precompiled_for_tests OBJECT EXCLUDE_FROM_ALL ${ebb_precompiled_source})
    target_link_libraries(ebb_precompiled_for_tests PRIVATE absl::statusor absl::strings GTest::gmock GTest::gtest)
    target_precompile_headers(ebb_precompiled_for_tests PRIVATE
      <algorithm> <cstdint> <functional> <map> <memory> <optional> <string> <utility> <vector>
      <absl/status/status.h> <absl/status/statusor.h> <absl/strings/str_cat.h> <gmock/gmock.h> <gtest/gtest.h>)
  endif()
endmacro()

# ebb_precompiled(TARGET): TARGET, of the folder of the tests, takes what was precompiled for them.
function(ebb_precompiled target)
  if(EBB_UNITY)
    target_precompile_headers(${target} REUSE_FROM ebb_precompiled_for_tests)
  endif()
endfunction()
