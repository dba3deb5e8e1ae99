// The values that a file leaves to the trainer.
#include <map>
#include <string>
#include <string_view>
#include <utility>

#include "ebb/runtime/base/message.h"
#include "ebb/runtime/config/key_rows.h"
#include "ebb/runtime/config/reader.h"

namespace ebb::config {
namespace {

constexpr std::string_view kOptimizerParameters[] = {
    "optimizer.params.lr", "optimizer.params.betas", "optimizer.params.eps",
    "optimizer.params.weight_decay"};
constexpr std::string_view kTotalSteps = "scheduler.params.total_num_steps";

bool IsTrue(const Json* value) {
  return value != nullptr && value->is_boolean() && value->get<bool>();
}

void Append(std::string_view sentence, std::string& list) {
  list += Join({list.empty() ? "" : ", ", sentence});
}

std::map<std::string_view, Json> ByPath(const TrainerValues& trainer) {
  std::map<std::string_view, Json> values;
  const auto know = [&](std::string_view path, const auto& value) {
    if (value.has_value()) values.emplace(path, *value);
  };
  know("train_micro_batch_size_per_gpu", trainer.micro_batch_size);
  know("gradient_accumulation_steps", trainer.gradient_accumulation_steps);
  know("gradient_clipping", trainer.gradient_clipping);
  know("optimizer.params.lr", trainer.learning_rate);
  if (trainer.beta1.has_value() && trainer.beta2.has_value()) {
    values.emplace("optimizer.params.betas", Json::array({*trainer.beta1, *trainer.beta2}));
  }
  know("optimizer.params.eps", trainer.epsilon);
  know("optimizer.params.weight_decay", trainer.weight_decay);
  know("scheduler.params.warmup_num_steps", trainer.warmup_steps);
  know(kTotalSteps, trainer.total_steps);
  if (trainer.compute.has_value()) {
    values.emplace("fp16.enabled", *trainer.compute == DType::kFloat16);
    values.emplace("bf16.enabled", *trainer.compute == DType::kBFloat16);
  }
  return values;
}

class Filler {
 public:
  Filler(Reading& reading, Problems& problems) : reading_(reading), problems_(problems) {}

  void Fill() {
    FillAuto(reading_.values);
    for (auto& [name, group] : reading_.values.groups) FillAuto(group);
    FillMissing(reading_.values);
    if (!filled_.empty()) Remark(reading_.remarks, {"filled in by the trainer: ", filled_});
    if (!left_.empty()) Remark(reading_.remarks, {"\"auto\" taken as the default: ", left_});
  }

 private:
  // Replaces how an "auto" was taken, or adds a key that the file does not have.
  void Say(const std::string& shown, std::string how) {
    for (TakenKey& taken : reading_.keys) {
      if (taken.shown == shown) {
        taken.how = std::move(how);
        return;
      }
    }
    reading_.keys.push_back({shown, "(missing)", std::move(how), FindKey(shown)});
  }

  bool Put(std::string_view path, Values& values) {
    const auto found = reading_.of_trainer.find(path);
    if (found == reading_.of_trainer.end()) return false;
    const auto& [key_path, value] = *found;
    Given& given = values.given[key_path];
    if (given.shown.empty()) given.shown = path;
    if (!Check(*FindKey(path), value, Join({"the trainer's ", given.shown}), problems_))
      return false;
    given.value = &value;
    Append(Join({Quoted(given.shown), " ", Shown(value)}), filled_);
    Say(given.shown, Join({"filled in by the trainer: ", Shown(value)}));
    return true;
  }

  void FillAuto(Values& values) {
    const bool other_is_on =
        IsTrue(values.Value("fp16.enabled")) || IsTrue(values.Value("bf16.enabled"));
    for (auto& [path, given] : values.given) {
      if (given.value != nullptr) continue;
      // If the total is known, the arithmetic of the triple gives the two others.
      const bool is_derived =
          path == "train_batch_size" ||
          (values.Value("train_batch_size") != nullptr &&
           (path == "train_micro_batch_size_per_gpu" || path == "gradient_accumulation_steps"));
      const bool is_other_precision =
          other_is_on && (path == "fp16.enabled" || path == "bf16.enabled");
      if (is_derived) {
        Say(given.shown, "derived from the other sizes of the batch");
      } else if (path == "scheduler.params.warmup_max_lr") {
        Say(given.shown, "the optimizer's rate");
      } else if (is_other_precision || !Put(path, values)) {
        const Row& row = FindRow(path);
        const bool is_own = HasWord(row.own_default_for, values.Type("optimizer"));
        const std::string_view value = is_own ? row.own_default : row.default_value;
        Append(Join({Quoted(given.shown), " ", value.empty() ? "not given" : value}), left_);
        Say(given.shown, "the default");
      }
    }
  }

  void FillMissing(Values& values) {
    const auto has_number = [&](std::string_view path) { return values.Value(path) != nullptr; };
    if (!has_number("train_batch_size") && !has_number("train_micro_batch_size_per_gpu")) {
      Put("train_micro_batch_size_per_gpu", values);
    }
    if (values.Find("optimizer.type") == nullptr) {
      for (std::string_view path : kOptimizerParameters) {
        if (values.Value(path) == nullptr) Put(path, values);
      }
    }
    if (!has_number(kTotalSteps) &&
        HasWord(FindRow(kTotalSteps).required_for, values.Type("scheduler"))) {
      Put(kTotalSteps, values);
    }
  }

  Reading& reading_;
  Problems& problems_;
  std::string filled_, left_;
};

}  // namespace

void FillFromTrainer(const TrainerValues& trainer, Reading& reading, Problems& problems) {
  reading.of_trainer = ByPath(trainer);
  Filler(reading, problems).Fill();
}

}  // namespace ebb::config
