#include "ebb/runtime/engine/instruction_arithmetic.h"

#include <span>

#include "ebb/optim/norm.h"

namespace ebb {

using sharding::Access;
using sharding::Code;
using sharding::Instruction;
using sharding::Operand;
using sharding::OperationKind;

void InstructionArithmetic::Run(const LinkedFragment& run, int index, const StepTag& step,
                                Stream& stream) const {
  const Instruction& instruction = run[index];
  switch (instruction.code) {
    case Code::kCheckFiles:
      with_.verifier->FilesAreOurs();
      return;
    case Code::kUpdate:
    case Code::kParameterNorms:
      return with_.updates->Run(run, index, step, stream);
    default:
      break;
  }
  for (int part = 0; part < std::ssize(instruction.parts); ++part) {
    switch (instruction.code) {
      case Code::kCast:
        Cast(run, index, 2 * part, stream);
        break;
      case Code::kAccumulate:
        Accumulate(run, index, part, stream);
        break;
      case Code::kNorm:
        Norm(run, index, part, stream);
        break;
      default:
        break;
    }
  }
}

void InstructionArithmetic::Cast(const LinkedFragment& run, int index, int first,
                                 Stream& stream) const {
  const Instruction& instruction = run[index];
  const Operand &from = instruction.operands[static_cast<size_t>(first)],
                &to = instruction.operands[static_cast<size_t>(first) + 1];
  const std::byte* const source = run.At(index, first);
  std::byte* const destination = run.At(index, first + 1);
  const bool casts = instruction.role == OperationKind::kCastMasters;
  if (casts)
    with_.verifier->VerifyMasters(instruction.updates[static_cast<size_t>(first) / 2].sub_group,
                                  source);
  if (instruction.via) {
    with_.kernels.Of(stream).CastVia(stream, source, from.dtype, *instruction.via, destination,
                                     to.dtype, to.count);
  } else {
    with_.kernels.Of(stream).Cast(stream, source, from.dtype, destination, to.dtype, to.count,
                                  casts ? optim::Rounding::kParameter : optim::Rounding::kNearest);
  }
}

namespace {

std::span<double> BlocksAt(std::byte* scratch, int64_t count) {
  return {reinterpret_cast<double*>(scratch), static_cast<size_t>(optim::NormBlocks(count))};
}

}  // namespace

void InstructionArithmetic::Accumulate(const LinkedFragment& run, int index, int part,
                                       Stream& stream) const {
  constexpr int kOperands = 4;  // slice, shard, square, scratch
  const int first = part * kOperands;
  const std::span<const Operand> operands =
      run[index].operands.subspan(static_cast<size_t>(first), kOperands);
  const optim::AccumulateArrays arrays{.source = run.At(index, first),
                                       .source_dtype = operands[0].dtype,
                                       .destination = run.At(index, first + 1),
                                       .destination_dtype = operands[1].dtype,
                                       .count = operands[1].count,
                                       .add = sharding::Reads(operands[1].access)};
  if (operands[2].access == Access::kNone) {
    with_.kernels.Of(stream).Accumulate(stream, arrays);
  } else {
    with_.kernels.Of(stream).AccumulateAndSumSquares(
        stream, arrays, BlocksAt(run.At(index, first + 3), operands[1].count),
        &with_.control->square(run[index].parts[static_cast<size_t>(part)].unit));
  }
}

void InstructionArithmetic::Norm(const LinkedFragment& run, int index, int part,
                                 Stream& stream) const {
  constexpr int kOperands = 3;  // shard, square, scratch
  const int first = part * kOperands;
  const Operand& shard = run[index].operands[static_cast<size_t>(first)];
  with_.kernels.Of(stream).SumOfSquares(
      stream, run.At(index, first), shard.dtype, shard.count,
      BlocksAt(run.At(index, first + 2), shard.count),
      &with_.control->square(run[index].parts[static_cast<size_t>(part)].unit));
}

}  // namespace ebb
