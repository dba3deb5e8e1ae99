// AdamW steps on demand: for each line of the input one step over ELEMENTS parameters with fp32
// gradients, and a line with its seconds and the first parameter. What
// optimizer_against_peers.py runs in turns with others.
//
//   optimizer_step ELEMENTS THREADS
#include <chrono>
#include <cstdlib>
#include <iomanip>
#include <iostream>
#include <string>

#include "ebb/optim/update.h"
#include "huge_pages.h"

int main(int argc, char** argv) {
  const int64_t count = argc == 3 ? std::atoll(argv[1]) : 0;
  const int threads = argc == 3 ? std::atoi(argv[2]) : 0;
  if (count < 1 || threads < 1) {
    std::cerr << "optimizer_step ELEMENTS THREADS\n";
    return 1;
  }
  ebb::HugePages memory(ebb::HugePages::BytesFor(4, count));
  if (!memory.ok()) {
    std::cerr << "no memory for " << count << " elements\n";
    return 1;
  }
  const ebb::optim::UpdateArrays arrays = {
      .master = memory.Take(count, 1.0f),
      .gradient = memory.Take(count, 0.25f),
      .states = {memory.Take(count, 0.0f), memory.Take(count, 0.0f)},
      .count = count};
  const ebb::OptimizerConfig optimizer = {.weight_decay = 0.01};
  ebb::ThreadTeam team(threads);
  ebb::optim::UpdateScalars scalars = {.step = 0, .learning_rate = 1e-3};
  for (std::string line; std::getline(std::cin, line);) {
    ++scalars.step;
    const auto start = std::chrono::steady_clock::now();
    ebb::optim::Update(team, optimizer, arrays, scalars);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    std::cout << seconds.count() << ' ' << std::setprecision(9) << arrays.master[0] << std::endl;
  }
}
