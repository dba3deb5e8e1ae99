# Settings of every target in the tree: the language, the warnings, the sanitizers, the folder of binaries, and the one spelling
# of includes ("ebb/sharding/layout.h"). The links in cmake/include make this spelling the same here and installed.
#
# Flags are private to this folder and those below it. A project that links Ebb, installed or as a subdirectory, gets only the
# include folder and C++20 from it, and keeps its own warnings.

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin)

# C is for programs over the C interface, and for tests that call MPI.
include(CheckLanguage)
check_language(C)
if(CMAKE_C_COMPILER)
  enable_language(C)
endif()

set(EBB_INCLUDE_DIR ${PROJECT_SOURCE_DIR}/cmake/include)

find_program(EBB_CCACHE ccache)
# Checkouts in different folders share what is compiled, because the cache sees paths relative to the checkout.
set(EBB_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} ${EBB_CCACHE})
if(EBB_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${EBB_COMPILER_LAUNCHER})
endif()

add_library(ebb_build INTERFACE)
target_include_directories(ebb_build INTERFACE ${EBB_INCLUDE_DIR})
# With contraction the compiler would round a * b + c once on one target and twice on another.
target_compile_options(ebb_build INTERFACE
  "$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wshadow;-Wnon-virtual-dtor;-Werror;-ffp-contract=off;-fno-math-errno>")
if(EBB_SANITIZE)
  target_compile_options(ebb_build INTERFACE
    "$<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${EBB_SANITIZE};-fno-sanitize-recover=all;-fno-omit-frame-pointer>")
  target_link_options(ebb_build INTERFACE -fsanitize=${EBB_SANITIZE})
endif()
include_directories(${EBB_INCLUDE_DIR})
add_compile_options($<TARGET_PROPERTY:ebb_build,INTERFACE_COMPILE_OPTIONS>)
add_link_options($<TARGET_PROPERTY:ebb_build,INTERFACE_LINK_OPTIONS>)

# ebb_library(NAME SOURCES... LIBRARIES...): the target ebb_NAME, with the alias ebb::NAME.
function(ebb_library name)
  cmake_parse_arguments(arg "" "" "SOURCES;LIBRARIES;PRIVATE_LIBRARIES" ${ARGN})
  add_library(ebb_${name} STATIC ${arg_SOURCES})
  add_library(ebb::${name} ALIAS ebb_${name})
  target_include_directories(ebb_${name} PUBLIC $<BUILD_INTERFACE:${EBB_INCLUDE_DIR}>)
  target_compile_features(ebb_${name} PUBLIC cxx_std_20)
  target_link_libraries(ebb_${name} PUBLIC ${arg_LIBRARIES} PRIVATE ${arg_PRIVATE_LIBRARIES})
  ebb_unity(ebb_${name})
endfunction()

# ebb_test(NAME [SOURCES...] [LIBRARIES...] [SHARDS n | LONG]): one test program, from NAME.cc or from SOURCES, with our main.
function(ebb_test name)
  cmake_parse_arguments(arg "LONG" "SHARDS" "SOURCES;LIBRARIES" ${ARGN})
  if(NOT arg_SOURCES)
    set(arg_SOURCES ${name}.cc)
  endif()
  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE ${arg_LIBRARIES} ebb_test_main GTest::gmock GTest::gtest)
  ebb_unity_of_tests(${name})
  ebb_ctest_entry(${name} ${name} SHARDS "${arg_SHARDS}")
  if(arg_LONG)
    ebb_start_early(${name})
  endif()
endfunction()

# Command lines run once and are long to compile with all optimisation.
function(ebb_command_line_sources)
  set_source_files_properties(${ARGN} PROPERTIES COMPILE_OPTIONS "$<$<CONFIG:Release>:-O1>")
endfunction()

# The longest tests start early, so that no core is idle at the end. Those that use no disk start first, because a disk is slow while
# the system still writes the files of the build.
function(ebb_start_early)
  set_tests_properties(${ARGN} PROPERTIES COST 100)
endfunction()
function(ebb_start_first)
  set_tests_properties(${ARGN} PROPERTIES COST 200)
endfunction()

# ebb_ctest_entry(NAME PROGRAM [SHARDS n] [FILTER filter]): all tests of PROGRAM that match FILTER, in one process or in SHARDS
# processes. `ctest -L "^PROGRAM$"` runs them.
function(ebb_ctest_entry name program)
  cmake_parse_arguments(arg "" "SHARDS;FILTER" "" ${ARGN})
  set(timeout 600)
  if(EBB_SANITIZE)
    set(timeout 2400)
  endif()
  set(command ${program})
  if(arg_FILTER)
    list(APPEND command --gtest_filter=${arg_FILTER})
  endif()
  set(properties LABELS ${program} TIMEOUT ${timeout} SKIP_RETURN_CODE 77)
  if(NOT arg_SHARDS)
    add_test(NAME ${name} COMMAND ${command})
    set_tests_properties(${name} PROPERTIES ${properties})
    return()
  endif()
  math(EXPR last "${arg_SHARDS} - 1")
  foreach(shard RANGE ${last})
    add_test(NAME ${name}/${shard} COMMAND ${command})
    ebb_start_early(${name}/${shard})
    set_tests_properties(${name}/${shard} PROPERTIES ${properties}
      ENVIRONMENT "GTEST_TOTAL_SHARDS=${arg_SHARDS};GTEST_SHARD_INDEX=${shard}")
  endforeach()
endfunction()

# ebb_test_objects(NAME SOURCES... LIBRARIES...): objects of several test programs, compiled once. A program must name them
# itself, because CMake passes on their libraries, but not the objects.
function(ebb_test_objects name)
  cmake_parse_arguments(arg "" "" "SOURCES;LIBRARIES" ${ARGN})
  add_library(${name} OBJECT ${arg_SOURCES})
  target_link_libraries(${name} PUBLIC ${arg_LIBRARIES} GTest::gmock GTest::gtest)
  ebb_unity_of_tests(${name})
endfunction()

function(ebb_print_summary)
  message(STATUS "Ebb ${PROJECT_VERSION}: build type ${CMAKE_BUILD_TYPE}, sanitizers '${EBB_SANITIZE}', "
                 "tests ${EBB_TESTS}, bench ${EBB_BENCH}, examples ${EBB_EXAMPLES}")
endfunction()
