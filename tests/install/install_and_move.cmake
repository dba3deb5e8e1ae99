# Installs a copy of the tree, removes the copy, and moves what was installed to another prefix: what the other tests find there is all
# that there is. The public headers and no other are in it, as files, and no file that others read names the tree, the copy or the first
# prefix.
#
#   cmake -D SOURCE_DIR=... -D BUILD_DIR=... -D WORK_DIR=... -D OPTIONS=... -D LIBRARIES=... -D HEADERS=... -D DOC_DIR=...
#         -D COMPONENTS=... -D CONFIG=... -P ...
#
# OPTIONS: what the copy is configured with. LIBRARIES: those of the build folder, which the copy takes instead of building them again.
cmake_minimum_required(VERSION 3.22)
set(copy ${WORK_DIR}/copy)
set(first ${WORK_DIR}/first)
set(moved ${WORK_DIR}/moved)
file(REMOVE_RECURSE ${WORK_DIR})

foreach(part CMakeLists.txt LICENSE README.md ARCHITECTURE.md cmake docs examples offload optim runtime sharding)
  file(COPY ${SOURCE_DIR}/${part} DESTINATION ${copy}/source)
endforeach()
execute_process(
  COMMAND ${CMAKE_COMMAND} -S ${copy}/source -B ${copy}/build -D EBB_TESTS=OFF -D EBB_BENCH=OFF -D EBB_EXAMPLES=OFF -D EBB_TOOLS=OFF ${OPTIONS}
  COMMAND_ERROR_IS_FATAL ANY OUTPUT_QUIET)
foreach(library ${LIBRARIES})
  file(RELATIVE_PATH path ${BUILD_DIR} ${library})
  cmake_path(GET path PARENT_PATH folder)
  file(COPY ${library} DESTINATION ${copy}/build/${folder})
endforeach()
execute_process(
  COMMAND ${CMAKE_COMMAND} --install ${copy}/build --prefix ${first} --component development --config ${CONFIG}
  COMMAND_ERROR_IS_FATAL ANY OUTPUT_QUIET)
file(REMOVE_RECURSE ${copy})
file(RENAME ${first} ${moved})

file(GLOB_RECURSE files ${moved}/*)
foreach(file ${files})
  if(IS_SYMLINK ${file})
    file(READ_SYMLINK ${file} to)
    message(FATAL_ERROR "${file} is a link to ${to}")
  endif()
endforeach()

function(expect_same what installed wanted)
  list(SORT installed)
  list(SORT wanted)
  if(NOT installed STREQUAL wanted)
    message(FATAL_ERROR "installed ${what}: ${installed}\nwanted: ${wanted}")
  endif()
endfunction()

file(GLOB_RECURSE installed RELATIVE ${moved}/include/ebb ${moved}/include/*)
expect_same(headers "${installed}" "${HEADERS};ebb-config.schema.json")
file(GLOB_RECURSE installed RELATIVE ${moved}/${DOC_DIR} ${moved}/${DOC_DIR}/*)
file(GLOB_RECURSE wanted RELATIVE ${SOURCE_DIR} ${SOURCE_DIR}/docs/* ${SOURCE_DIR}/examples/*)
list(FILTER wanted EXCLUDE REGEX __pycache__)
expect_same(documentation "${installed}" "LICENSE;README.md;ARCHITECTURE.md;${wanted}")

# A page's links lead to installed files, and the examples that it names are installed.
file(GLOB_RECURSE pages ${moved}/${DOC_DIR}/*.md)
foreach(page ${pages})
  file(READ ${page} text)
  string(REPLACE "](" "link to " text "${text}")  # no list is cut within brackets
  string(REGEX MATCHALL "link to [A-Za-z0-9_./-]+\\.[a-z]+[)#]" links "${text}")
  cmake_path(GET page PARENT_PATH folder)
  foreach(link ${links})
    string(REGEX REPLACE "link to (.*)[)#]" "\\1" link ${link})
    if(NOT EXISTS ${folder}/${link})
      message(FATAL_ERROR "${page} has a link to ${link}, which is not installed")
    endif()
    list(APPEND followed ${link})
  endforeach()
  string(REGEX MATCHALL "examples/[A-Za-z0-9_./]*[A-Za-z0-9_]" examples "${text}")
  foreach(example ${examples})
    if(NOT EXISTS ${moved}/${DOC_DIR}/${example})
      message(FATAL_ERROR "${page} names ${example}, which is not installed")
    endif()
    list(APPEND followed ${example})
  endforeach()
endforeach()
foreach(known docs/trainer.md examples/features/state.cc)
  if(NOT ${known} IN_LIST followed)
    message(FATAL_ERROR "no page names ${known}, only ${followed}")
  endif()
endforeach()
file(READ ${moved}/${DOC_DIR}/README.md text)
foreach(component ${COMPONENTS})
  if(NOT text MATCHES "`${component}`")
    message(FATAL_ERROR "README.md does not name the component ${component}")
  endif()
endforeach()

file(GLOB_RECURSE texts ${moved}/*.h ${moved}/*.cmake ${moved}/*.pc)
foreach(file ${texts})
  file(READ ${file} text)
  foreach(path ${BUILD_DIR} ${SOURCE_DIR} ${copy} ${first})
    string(FIND "${text}" ${path} at)
    if(NOT at EQUAL -1)
      message(FATAL_ERROR "${file} names ${path}")
    endif()
  endforeach()
endforeach()
