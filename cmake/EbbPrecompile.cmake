# Parsing the standard library, absl and GoogleTest anew for each file is a third of a build from nothing: where
# EBB_PRECOMPILE is on, that is done once for all libraries and once for all tests. A compiler cache saves more, and finds
# nothing of another tree where headers are precompiled, so with one it is off.
#
# Every file still includes what it uses: builds with a cache see to that.
if(EBB_CCACHE)
  set(without_cache OFF)
else()
  set(without_cache ON)
endif()
option(EBB_PRECOMPILE "Precompile the headers that most files include" ${without_cache})

set(ebb_precompiled_source ${PROJECT_BINARY_DIR}/precompiled.cc)
if(NOT EXISTS ${ebb_precompiled_source})
  file(WRITE ${ebb_precompiled_source} "")
endif()

if(EBB_PRECOMPILE)
  add_library(ebb_precompiled_for_libraries OBJECT EXCLUDE_FROM_ALL ${ebb_precompiled_source})
  target_link_libraries(ebb_precompiled_for_libraries PRIVATE absl::statusor absl::strings)
  target_precompile_headers(ebb_precompiled_for_libraries PRIVATE
    <algorithm> <cstdint> <functional> <memory> <optional> <span> <string> <string_view> <utility> <vector>
    <absl/status/status.h> <absl/status/statusor.h> <absl/strings/str_cat.h>)
endif()

# For the folder of the tests, whose flags differ from the libraries'.
macro(ebb_precompile_for_tests)
  if(EBB_PRECOMPILE)
    # As libraries are compiled: what is precompiled for a program's own code cannot serve objects of several programs.
    add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fPIC>)
    add_library(ebb_precompiled_for_tests OBJECT EXCLUDE_FROM_ALL ${ebb_precompiled_source})
    target_link_libraries(ebb_precompiled_for_tests PRIVATE absl::statusor absl::strings GTest::gmock GTest::gtest)
    target_precompile_headers(ebb_precompiled_for_tests PRIVATE
      <algorithm> <cstdint> <functional> <map> <memory> <optional> <string> <utility> <vector>
      <absl/status/status.h> <absl/status/statusor.h> <absl/strings/str_cat.h> <gmock/gmock.h> <gtest/gtest.h>)
  endif()
endmacro()

# ebb_precompiled(TARGET libraries|tests): TARGET takes what was precompiled for them.
function(ebb_precompiled target kind)
  if(EBB_PRECOMPILE)
    target_precompile_headers(${target} REUSE_FROM ebb_precompiled_for_${kind})
  endif()
endfunction()
