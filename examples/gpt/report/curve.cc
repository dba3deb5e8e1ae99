#include <algorithm>
#include <cmath>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "report/history.h"
#include "report/progress.h"

namespace ebb::gpt {
namespace {

constexpr double kWidth = 720, kHeight = 400;
constexpr double kLeft = 56, kRight = 16, kTop = 58, kBottom = 44;
constexpr int kTicks = 6;

using Points = std::vector<std::pair<double, double>>;

// 1, 2 or 5 times a power of ten: the smallest such distance that needs at most kTicks ticks.
double TickDistance(double range) {
  const double rough = range / kTicks, power = std::pow(10, std::floor(std::log10(rough)));
  for (double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= rough) return factor * power;
  }
  return 10 * power;
}

// From numbers to the picture's coordinates.
struct Frame {
  double x_min = 0, x_max = 1, y_min = 0, y_max = 1;
  double X(double x) const {
    return kLeft + (x - x_min) / (x_max - x_min) * (kWidth - kLeft - kRight);
  }
  double Y(double y) const {
    return kHeight - kBottom - (y - y_min) / (y_max - y_min) * (kHeight - kTop - kBottom);
  }
};

Frame FrameOf(const Points& points) {
  Frame frame;
  if (points.empty()) return frame;
  frame = {points.front().first, points.front().first, points.front().second,
           points.front().second};
  for (const auto& [x, y] : points) {
    frame.x_min = std::min(frame.x_min, x), frame.x_max = std::max(frame.x_max, x);
    frame.y_min = std::min(frame.y_min, y), frame.y_max = std::max(frame.y_max, y);
  }
  if (frame.x_max == frame.x_min) frame.x_max = frame.x_min + 1;
  const double margin = frame.y_max == frame.y_min ? 0.5 : 0.05 * (frame.y_max - frame.y_min);
  frame.y_min -= margin, frame.y_max += margin;
  return frame;
}

Points LossesOf(const History& history) {
  Points points;
  for (const StepRecord& record : history.steps) {
    if (std::isfinite(record.report.loss))
      points.emplace_back(static_cast<double>(record.report.step), record.report.loss);
  }
  return points;
}

// Exponential moving average over about a twentieth of the steps.
Points Smooth(const Points& points) {
  Points smooth = points;
  const double keep = 1 - 1 / std::max(1.0, static_cast<double>(points.size()) / 20);
  for (size_t i = 1; i < smooth.size(); ++i)
    smooth[i].second = keep * smooth[i - 1].second + (1 - keep) * points[i].second;
  return smooth;
}

void AddAxes(const Frame& f, std::string& svg) {
  const double dx = TickDistance(f.x_max - f.x_min), dy = TickDistance(f.y_max - f.y_min);
  for (double y = std::ceil(f.y_min / dy) * dy; y <= f.y_max; y += dy) {
    absl::StrAppendFormat(
        &svg,
        "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" stroke=\"#e4e4e4\"/>"
        "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"end\">%.4g</text>\n",
        kLeft, f.Y(y), kWidth - kRight, f.Y(y), kLeft - 8, f.Y(y) + 4, y);
  }
  for (double x = std::ceil(f.x_min / dx) * dx; x <= f.x_max; x += dx) {
    absl::StrAppendFormat(&svg, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\">%.6g</text>\n",
                          f.X(x), kHeight - kBottom + 18, x);
  }
  absl::StrAppendFormat(&svg, "<path d=\"M%.1f %.1fV%.1fH%.1f\" fill=\"none\" stroke=\"#444\"/>\n",
                        kLeft, kTop, kHeight - kBottom, kWidth - kRight);
  absl::StrAppendFormat(&svg, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\">step</text>\n",
                        (kLeft + kWidth - kRight) / 2, kHeight - 8);
}

// Printable ASCII as XML; a path may have any bytes.
std::string XmlText(const std::string& text) {
  return absl::StrReplaceAll(Printable(text),
                             {{"&", "&amp;"}, {"<", "&lt;"}, {">", "&gt;"}, {"\n", " "}});
}

std::string LastOf(const char* what, const Points& points) {
  if (points.empty()) return what;
  return absl::StrFormat("%s %.4f after step %.0f", what, points.back().second,
                         points.back().first);
}

void AddLine(const Frame& frame, const Points& points, std::string_view style, std::string& svg) {
  if (points.empty()) return;
  svg += "<polyline fill=\"none\" stroke-linejoin=\"round\" ";
  svg += style;
  svg += " points=\"";
  for (const auto& [x, y] : points)
    absl::StrAppendFormat(&svg, "%.1f,%.1f ", frame.X(x), frame.Y(y));
  svg += "\"/>\n";
}

}  // namespace

std::string CurveSvg(const History& history, const CurveTitle& title) {
  const Points losses = LossesOf(history);
  Points held_out;
  for (const Evaluated& e : history.held_out) {
    if (std::isfinite(e.loss)) held_out.emplace_back(static_cast<double>(e.step), e.loss);
  }
  Points all = losses;
  all.insert(all.end(), held_out.begin(), held_out.end());
  const Frame frame = FrameOf(all);

  std::string svg = absl::StrFormat(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%.0f\" height=\"%.0f\" viewBox=\"0 0 %.0f "
      "%.0f\" "
      "font-family=\"sans-serif\" font-size=\"12\" fill=\"#444\">\n<rect width=\"100%%\" "
      "height=\"100%%\" fill=\"white\"/>\n",
      kWidth, kHeight, kWidth, kHeight);
  absl::StrAppendFormat(&svg,
                        "<text x=\"%.1f\" y=\"16\" font-weight=\"bold\">%s</text>\n"
                        "<text x=\"%.1f\" y=\"32\">%s</text>\n"
                        "<text x=\"%.1f\" y=\"48\"><tspan fill=\"#1f5fa8\">%s</tspan>"
                        "<tspan dx=\"12\" fill=\"#c0392b\">%s</tspan></text>\n",
                        kLeft, XmlText(title.model), kLeft, XmlText(title.data), kLeft,
                        LastOf("loss", losses), LastOf("held-out loss", held_out));
  AddAxes(frame, svg);
  AddLine(frame, losses, "stroke=\"#a9c8e8\"", svg);
  AddLine(frame, Smooth(losses), "stroke=\"#1f5fa8\" stroke-width=\"2\"", svg);
  for (const auto& [x, y] : held_out) {
    absl::StrAppendFormat(&svg, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"3.5\" fill=\"#c0392b\"/>\n",
                          frame.X(x), frame.Y(y));
  }
  return svg + "</svg>\n";
}

}  // namespace ebb::gpt
