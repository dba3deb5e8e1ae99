# A build from nothing spends two thirds of its time on parsing the standard library, absl, a JSON library and GoogleTest for
# each file. EBB_UNITY compiles libraries and tests in groups of files, and tests with precompiled headers.
# A compiler cache saves more. It works for single files from any tree, but for a group only if none of its files has changed. So
# EBB_UNITY is off if there is a cache.
#
# Builds with a cache check that every file includes what it uses. Builds without one check that the unnamed namespaces of one
# library or test program have different names.
if(EBB_CCACHE)
  set(without_cache OFF)
else()
  set(without_cache ON)
endif()
option(EBB_UNITY "Compile in groups of files, and tests with precompiled headers" ${without_cache})

# ebb_unity(TARGET): compiles TARGET, a library, in groups of files.
function(ebb_unity target)
  if(EBB_UNITY)
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 24)
    # GCC allows such members only in the main file, and no file of a group is the main file.
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-subobject-linkage>)
  endif()
endfunction()

# Sources that are in no group: Highway's foreach_target.h includes some again by their own name, for each instruction set; and a
# function that a test program may define in place of the library's must be the only one of its object.
function(ebb_compiled_alone)
  set_source_files_properties(${ARGN} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
endfunction()

# For the folder of the tests. Its flags differ from the libraries'.
macro(ebb_precompile_for_tests)
  if(EBB_UNITY)
    set(ebb_precompiled_source ${PROJECT_BINARY_DIR}/precompiled.cc)
    if(NOT EXISTS ${ebb_precompiled_source})
      file(WRITE ${ebb_precompiled_source} "")
    endif()
    # Compiled like libraries, because headers that are precompiled for a program do not fit objects of several programs.
    add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fPIC>)
    add_library(ebb_precompiled_for_tests OBJECT EXCLUDE_FROM_ALL ${ebb_precompiled_source})
    target_link_libraries(ebb_precompiled_for_tests PRIVATE absl::statusor absl::strings GTest::gmock GTest::gtest)
    target_precompile_headers(ebb_precompiled_for_tests PRIVATE
      <algorithm> <cstdint> <functional> <map> <memory> <optional> <string> <utility> <vector>
      <absl/status/status.h> <absl/status/statusor.h> <absl/strings/str_cat.h> <gmock/gmock.h> <gtest/gtest.h>)
  endif()
endmacro()

# ebb_unity_of_tests(TARGET): compiles TARGET, in the folder of the tests, in smaller groups, which occupy all cores until the end.
function(ebb_unity_of_tests target)
  if(EBB_UNITY)
    ebb_unity(${target})
    set_target_properties(${target} PROPERTIES UNITY_BUILD_BATCH_SIZE 8)
    target_precompile_headers(${target} REUSE_FROM ebb_precompiled_for_tests)
  endif()
endfunction()
