# CUDA and NCCL are used if they are found; EBB_CUDA and EBB_NCCL override this. Programs with CUDA start on machines without a
# driver: the CUDA runtime is linked statically and looks for the driver at its first call. NCCL is opened when the first
# communicator is made (runtime/device/opened_library.h), so only its header is needed.

include(CheckLanguage)
find_package(CUDAToolkit 12.0 QUIET)
check_language(CUDA)
set(ebb_cuda_found OFF)
if(CUDAToolkit_FOUND AND CMAKE_CUDA_COMPILER)
  set(ebb_cuda_found ON)
endif()
option(EBB_CUDA "Build the CUDA backend" ${ebb_cuda_found})

if(EBB_CUDA)
  if(NOT ebb_cuda_found)
    message(FATAL_ERROR "EBB_CUDA is ON, but no CUDA toolkit of version 12.0 or later with nvcc was found: put nvcc on PATH, "
                        "set CUDAToolkit_ROOT, or configure with -DEBB_CUDA=OFF")
  endif()
  # Machine code from Ampere on, and PTX, which later devices compile at load. Builds for a sanitizer have PTX alone, because a
  # sanitizer checks only the host's code.
  if(NOT CMAKE_CUDA_ARCHITECTURES AND EBB_SANITIZE)
    set(CMAKE_CUDA_ARCHITECTURES 80-virtual)
  elseif(NOT CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 80-real 90-real 100-real 100-virtual)
    set(GPT_CUDA_ARCHITECTURES 80)  # of the example: one, with PTX for later devices
  endif()
  if(EBB_CCACHE AND NOT CMAKE_CUDA_COMPILER_LAUNCHER)
    set(CMAKE_CUDA_COMPILER_LAUNCHER ${EBB_COMPILER_LAUNCHER})
  endif()
  enable_language(CUDA)
  # CMake 3.25 does not know yet that nvcc has C++20.
  if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
    set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
  endif()
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
  # Warnings are errors. Register spills are errors, too, except those in known_spills.txt. This holds only for the compiler of
  # that list, because other compilers spill elsewhere.
  set(ebb_cuda_warnings --Werror=all-warnings)
  if(CMAKE_CUDA_COMPILER_ID STREQUAL "NVIDIA" AND CMAKE_CUDA_COMPILER_VERSION STREQUAL "13.0.88")
    set(ebb_cuda_warnings -Xptxas=-warn-spills)
    list(PREPEND CMAKE_CUDA_COMPILER_LAUNCHER ${PROJECT_SOURCE_DIR}/cmake/known_spills.sh
         ${PROJECT_SOURCE_DIR}/cmake/known_spills.txt)
  endif()
  # No contraction, so that host and device give the same bits.
  target_compile_options(ebb_build INTERFACE
    "$<$<COMPILE_LANGUAGE:CUDA>:${ebb_cuda_warnings};--fmad=false;-Xcompiler=-Wall,-Wextra,-Werror,-ffp-contract=off>")
endif()

find_path(EBB_NCCL_INCLUDE_DIR nccl.h HINTS ${CUDAToolkit_INCLUDE_DIRS})
mark_as_advanced(EBB_NCCL_INCLUDE_DIR)
set(ebb_nccl_found OFF)
if(EBB_CUDA AND EBB_NCCL_INCLUDE_DIR)
  set(ebb_nccl_found ON)
endif()
option(EBB_NCCL "Build the NCCL communicator" ${ebb_nccl_found})
if(EBB_NCCL AND NOT ebb_nccl_found)
  message(FATAL_ERROR "EBB_NCCL is ON, but there is no nccl.h, or EBB_CUDA is OFF: set EBB_NCCL_INCLUDE_DIR, or configure "
                      "with -DEBB_NCCL=OFF")
endif()

message(STATUS "CUDA ${EBB_CUDA} (toolkit ${CUDAToolkit_VERSION}), NCCL ${EBB_NCCL}")
