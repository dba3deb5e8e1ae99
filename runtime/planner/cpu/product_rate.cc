#include <omp.h>

#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/device/thread_team.h"
#include "ebb/runtime/planner/measure.h"
#include "oneapi/dnnl/dnnl.hpp"

namespace ebb::planner {
namespace {

dnnl::memory::data_type FastestType() {
  constexpr int kBf16 = static_cast<int>(dnnl::cpu_isa::avx512_core_bf16);
  const bool has_bf16 = (static_cast<int>(dnnl::get_effective_cpu_isa()) & kBf16) == kBf16;
  return has_bf16 ? dnnl::memory::data_type::bf16 : dnnl::memory::data_type::f32;
}

// c = a b, all of kSide x kSide. oneDNN's own threads stay off, as with ranks.
double RateOfThread() {
  constexpr dnnl::memory::dim kSide = 1024;
  const int threads_before = omp_get_max_threads();
  omp_set_num_threads(1);
  const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  const dnnl::memory::desc matrix({kSide, kSide}, FastestType(), dnnl::memory::format_tag::ab);
#if DNNL_VERSION_MAJOR >= 3
  const dnnl::matmul product(dnnl::matmul::primitive_desc(engine, matrix, matrix, matrix));
#else
  const dnnl::matmul product(dnnl::matmul::primitive_desc({matrix, matrix, matrix}, engine));
#endif
  std::vector<float> zeros(3 * kSide * kSide);
  std::unordered_map<int, dnnl::memory> matrices;
  for (const int of : {DNNL_ARG_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_DST}) {
    float* const data =
        zeros.data() + static_cast<dnnl::memory::dim>(matrices.size()) * kSide * kSide;
    matrices.emplace(of, dnnl::memory(matrix, engine, data));
  }
  dnnl::stream stream(engine);
  const double seconds = MedianSeconds([&] {
    product.execute(stream, matrices);
    stream.wait();
  });
  omp_set_num_threads(threads_before);
  return 2.0 * kSide * kSide * kSide / seconds;
}

}  // namespace

absl::StatusOr<double> ProductRateOfCores(int threads) {
  std::mutex mutex;
  double sum = 0;
  absl::Status status;
  const auto measure = [&] {
    double rate = 0;
    absl::Status own;
    try {
      rate = RateOfThread();
    } catch (const dnnl::error& error) {
      own = absl::UnavailableError(absl::StrCat("oneDNN cannot multiply: ", error.what()));
    }
    const std::lock_guard lock(mutex);
    sum += rate;
    status.Update(own);
  };
  ThreadTeam team(threads);  // of fewer, if the machine grants no more
  team.Run(team.threads(), /*grain=*/1, [&](int64_t, int64_t) { measure(); });
  EBB_RETURN_IF_ERROR(status);
  return sum * threads / team.threads();
}

}  // namespace ebb::planner
