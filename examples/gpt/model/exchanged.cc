// Bytes that Gathered, SumTerms and ReduceNumbers of layers.h move over tensor ranks.
#include <algorithm>

#include "model/layers.h"
#include "model/space.h"

namespace ebb::gpt {
namespace {

// By micro-batch, of rows of `row_bytes`.
class Collectives {
 public:
  Collectives(const TensorSplit& tensor, int64_t row_bytes)
      : tensor_(tensor), others_(tensor.ranks - 1), row_bytes_(row_bytes) {}

  // `own`: of the rows that each rank has between the layers that are cut.
  int64_t Gathered(int64_t own) const {
    return tensor_.divides_rows ? others_ * own * row_bytes_ : 0;
  }
  int64_t SumTerms(int64_t own) const {
    return tensor_.divides_rows ? others_ * own * row_bytes_ : AllReduced(own * row_bytes_);
  }
  int64_t ReduceNumbers(int64_t count) const {
    return AllReduced(count * static_cast<int64_t>(sizeof(float)));
  }

 private:
  int64_t AllReduced(int64_t bytes) const { return 2 * others_ * bytes / tensor_.ranks; }

  const TensorSplit& tensor_;
  const int64_t others_, row_bytes_;
};

}  // namespace

ExchangedBytes Layers::Exchanged(const Processor& processor, const GptShape& shape,
                                 const Options& options, bool recompute) {
  if (!options.tensor.cuts()) return {};
  const Collectives of(options.tensor, shape.width * SizeOf(options.compute));
  const int64_t parts = options.tensor.row_parts(), own = options.sequences * shape.context / parts,
                gathered = of.Gathered(own), summed = of.SumTerms(own);
  // A forward whose output is not wanted again ends before its last sum.
  const int64_t forward_again = recompute ? 2 * gathered + summed : 0;
  ExchangedBytes bytes = {.embedding = summed,
                          .block = 2 * gathered + 2 * summed,
                          .embedding_backward = gathered,
                          .block_backward = 4 * gathered + 2 * summed + forward_again};
  const int64_t own_chunk = Space(processor, shape, options, nullptr).chunk_rows / parts;
  for (int64_t first = 0; first < own; first += own_chunk) {
    const int64_t own_rows = std::min(own_chunk, own - first), rows = own_rows * parts;
    bytes.head += of.Gathered(own_rows) + of.SumTerms(own_rows) + of.ReduceNumbers(rows) +
                  of.ReduceNumbers(2 * rows);
  }
  return bytes;
}

}  // namespace ebb::gpt
