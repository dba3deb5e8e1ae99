// AdamW steps on demand. For each line of the input it makes one step over ELEMENTS parameters with
// fp32 gradients, and prints its seconds and the first parameter. optimizer_against_peers.py runs
// it in turns with other programs.
//
//   optimizer_step ELEMENTS THREADS [memory]
//
// memory: reads and writes the same arrays, with a mean instead of the optimizer, to show the limit
// of the machine's memory.
#include <chrono>
#include <cstdlib>
#include <iomanip>
#include <iostream>
#include <string>
#include <string_view>

#include "ebb/optim/update.h"
#include "huge_pages.h"

namespace {

#ifdef __x86_64__
[[gnu::target_clones("avx512f", "avx2", "default")]]
#endif
void Average(const float* __restrict gradient, float* __restrict master, float* __restrict momentum,
             float* __restrict variance, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    momentum[i] = 0.5f * (momentum[i] + gradient[i]);
    variance[i] = 0.5f * (variance[i] + gradient[i]);
    master[i] = 0.5f * (master[i] + gradient[i]);
  }
}

void ReadAndWrite(ebb::ThreadTeam& team, const ebb::optim::UpdateArrays& arrays) {
  const auto* const gradient = static_cast<const float*>(arrays.gradient);
  team.Run(arrays.count, 4096, [&](int64_t begin, int64_t end) {
    Average(gradient + begin, arrays.master + begin, arrays.states[0].numbers() + begin,
            arrays.states[1].numbers() + begin, end - begin);
  });
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t count = argc >= 3 ? std::atoll(argv[1]) : 0;
  const int threads = argc >= 3 ? std::atoi(argv[2]) : 0;
  const bool memory_alone = argc == 4 && std::string_view(argv[3]) == "memory";
  if (count < 1 || threads < 1 || (argc > 3 && !memory_alone)) {
    std::cerr << "optimizer_step ELEMENTS THREADS [memory]\n";
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
      .states = {{memory.Take(count, 0.0f)}, {memory.Take(count, 0.0f)}},
      .count = count};
  const ebb::OptimizerConfig optimizer = {.weight_decay = 0.01};
  ebb::ThreadTeam team(threads);
  ebb::optim::UpdateScalars scalars = {.step = 0, .learning_rate = 1e-3};
  for (std::string line; std::getline(std::cin, line);) {
    ++scalars.step;
    const auto start = std::chrono::steady_clock::now();
    if (memory_alone) {
      ReadAndWrite(team, arrays);
    } else {
      ebb::optim::Update(team, optimizer, arrays, scalars);
    }
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    std::cout << seconds.count() << ' ' << std::setprecision(9) << arrays.master[0] << std::endl;
  }
}
