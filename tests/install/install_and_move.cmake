# Installs into one prefix and moves it to another: the public headers and no other are there, and no file that others
# read tells where it was built, or installed at first.
cmake_minimum_required(VERSION 3.22)
file(REMOVE_RECURSE ${WORK_DIR})
set(first ${WORK_DIR}/first)
set(moved ${WORK_DIR}/moved)
execute_process(
  COMMAND ${CMAKE_COMMAND} --install ${BUILD_DIR} --prefix ${first} --component development --config ${CONFIG}
  COMMAND_ERROR_IS_FATAL ANY OUTPUT_QUIET)
file(RENAME ${first} ${moved})

file(GLOB_RECURSE installed RELATIVE ${moved}/include/ebb ${moved}/include/*)
list(SORT installed)
list(SORT HEADERS)
if(NOT installed STREQUAL HEADERS)
  message(FATAL_ERROR "installed headers: ${installed}\npublic headers: ${HEADERS}")
endif()

file(GLOB_RECURSE texts ${moved}/*.h ${moved}/*.cmake ${moved}/*.pc)
foreach(file ${texts})
  file(READ ${file} text)
  foreach(path ${BUILD_DIR} ${SOURCE_DIR} ${first})
    string(FIND "${text}" ${path} at)
    if(NOT at EQUAL -1)
      message(FATAL_ERROR "${file} names ${path}")
    endif()
  endforeach()
endforeach()

# What the other tests build, away from the tree.
file(COPY ${SOURCE_DIR}/examples/minimal DESTINATION ${WORK_DIR})
