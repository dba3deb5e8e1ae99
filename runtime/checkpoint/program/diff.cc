#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "ebb/runtime/checkpoint/program/program.h"
#include "ebb/runtime/checkpoint/tensor_source.h"
#include "ebb/runtime/config/status_macros.h"

namespace ebb {
namespace {

constexpr int64_t kPiece = int64_t{1} << 20;  // elements

struct Difference {
  int64_t elements = 0;  // that differ in bits
  double most = 0;       // the largest difference of two numbers
};

absl::StatusOr<Difference> Compare(TensorSource& a, size_t of_a, TensorSource& b, size_t of_b,
                                   ProgressBar& bar) {
  Difference difference;
  std::vector<float> x, y;
  const int64_t elements = a.tensors()[of_a].elements();
  for (int64_t begin = 0; begin < elements; begin += kPiece) {
    x.resize(static_cast<size_t>(std::min(kPiece, elements - begin)));
    y.resize(x.size());
    EBB_RETURN_IF_ERROR(a.Read(of_a, begin, x));
    EBB_RETURN_IF_ERROR(b.Read(of_b, begin, y));
    for (size_t i = 0; i < x.size(); ++i) {
      if (std::bit_cast<uint32_t>(x[i]) == std::bit_cast<uint32_t>(y[i])) continue;
      ++difference.elements;
      const double distance = std::fabs(static_cast<double>(x[i]) - static_cast<double>(y[i]));
      if (distance > difference.most) difference.most = distance;
    }
    bar.Add(static_cast<int64_t>(x.size()));
  }
  return difference;
}

}  // namespace

absl::StatusOr<int> Diff(const std::string& a_path, const std::string& b_path) {
  EBB_ASSIGN_OR_RETURN(const std::unique_ptr<TensorSource> a, OpenAnySource(a_path));
  EBB_ASSIGN_OR_RETURN(const std::unique_ptr<TensorSource> b, OpenAnySource(b_path));
  const std::string &a_name = a->description().path, &b_name = b->description().path;
  std::map<std::pair<std::string, std::string>, size_t> in_b;
  for (size_t i = 0; i < b->tensors().size(); ++i)
    in_b[{b->tensors()[i].name, b->tensors()[i].state}] = i;
  std::vector<std::string> lines;
  if (a->description().state != b->description().state) {
    lines.push_back(absl::StrCat("the steps or the loss scaler differ: step ",
                                 a->description().state.finished_steps, " and ",
                                 b->description().state.finished_steps));
  }
  int64_t total = 0, same = 0;
  for (const TensorInfo& tensor : a->tensors()) total += tensor.elements();
  {
    ProgressBar bar("comparing", total);
    for (size_t i = 0; i < a->tensors().size(); ++i) {
      const TensorInfo& tensor = a->tensors()[i];
      const auto found = in_b.find({tensor.name, tensor.state});
      if (found == in_b.end()) {
        lines.push_back(absl::StrCat(Described(tensor), " is only in '", a_name, "'"));
        continue;
      }
      const TensorInfo& other = b->tensors()[found->second];
      if (other.shape != tensor.shape) {
        lines.push_back(absl::StrCat(Described(tensor), " has the shapes ", ShapeText(tensor.shape),
                                     " and ", ShapeText(other.shape)));
      } else {
        EBB_ASSIGN_OR_RETURN(const Difference difference, Compare(*a, i, *b, found->second, bar));
        if (difference.elements > 0) {
          lines.push_back(absl::StrFormat("%s: %d of %d elements differ, by at most %.9g",
                                          Described(tensor), difference.elements, tensor.elements(),
                                          difference.most));
        } else {
          ++same;
        }
      }
      in_b.erase(found);
    }
  }
  for (const auto& [name, index] : in_b)
    lines.push_back(absl::StrCat(Described(b->tensors()[index]), " is only in '", b_name, "'"));
  for (const std::string& line : lines) absl::PrintF("%s\n", line);
  absl::PrintF("%d tensors have the same bits\n", same);
  return lines.empty() ? kDone : kOther;
}

}  // namespace ebb
