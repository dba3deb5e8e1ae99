# MPI connects CPU ranks on several hosts (runtime/comm/mpi): used where it is found, which EBB_MPI overrides. Only its C
# interface is, so a C compiler is needed to look for it; a project that links an installed Ebb has to find it too.
include(CheckLanguage)
set(ebb_mpi_found OFF)
check_language(C)
if(CMAKE_C_COMPILER)
  enable_language(C)
  find_package(MPI QUIET COMPONENTS C)
  if(MPI_C_FOUND)
    set(ebb_mpi_found ON)
  endif()
endif()
option(EBB_MPI "Build the MPI communicator, for CPU ranks on several hosts" ${ebb_mpi_found})
if(EBB_MPI AND NOT ebb_mpi_found)
  message(FATAL_ERROR "EBB_MPI is ON, but there is no MPI or no C compiler: install one (on Debian and Ubuntu libopenmpi-dev "
                      "and openmpi-bin), set MPI_HOME to where it is, or configure with -DEBB_MPI=OFF")
endif()
if(EBB_MPI)
  # mpi.h of old brings C++ classes of its own, which need another library.
  target_compile_definitions(MPI::MPI_C INTERFACE OMPI_SKIP_MPICXX=1 MPICH_SKIP_MPICXX=1)
endif()
message(STATUS "MPI ${EBB_MPI} (version of its interface: ${MPI_C_VERSION})")
