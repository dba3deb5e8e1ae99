// All-gather and reduce-scatter of an MPI library, timed as nccl-tests does, for
// bench/collectives_against_peers.py, which compiles this with mpicxx. Prints a line of JSON.
//
//   mpirun -n 2 mpi_collectives BYTES ITERATIONS
#include <mpi.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

namespace {

double MedianSeconds(int iterations, const std::function<void()>& operation) {
  std::vector<double> seconds;
  for (int i = 0; i < iterations + 2; ++i) {
    MPI_Barrier(MPI_COMM_WORLD);
    const double begin = MPI_Wtime();
    operation();
    MPI_Barrier(MPI_COMM_WORLD);
    if (i >= 2) seconds.push_back(MPI_Wtime() - begin);
  }
  std::sort(seconds.begin(), seconds.end());
  return seconds[seconds.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank = 0, ranks = 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  const long bytes = argc > 2 ? std::atol(argv[1]) : 64L << 20;
  const int iterations = argc > 2 ? std::atoi(argv[2]) : 10;
  const int count = static_cast<int>(bytes / 4 / ranks);
  std::vector<float> whole(static_cast<size_t>(count) * static_cast<size_t>(ranks), 1.0f),
      part(static_cast<size_t>(count), 1.0f);
  const double gather = MedianSeconds(iterations, [&] {
    MPI_Allgather(part.data(), count, MPI_FLOAT, whole.data(), count, MPI_FLOAT, MPI_COMM_WORLD);
  });
  const double in_place = MedianSeconds(iterations, [&] {
    MPI_Allgather(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, whole.data(), count, MPI_FLOAT,
                  MPI_COMM_WORLD);
  });
  const double scatter = MedianSeconds(iterations, [&] {
    MPI_Reduce_scatter_block(whole.data(), part.data(), count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  });
  if (rank == 0) {
    std::printf("{\"all_gather\": %.9f, \"all_gather_in_place\": %.9f, \"reduce_scatter\": %.9f}\n",
                gather, in_place, scatter);
  }
  MPI_Finalize();
}
