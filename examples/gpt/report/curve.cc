#include <algorithm>
#include <cmath>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "report/progress.h"

namespace ebb::gpt {
namespace {

constexpr double kWidth = 720, kHeight = 400;
constexpr double kLeft = 56, kRight = kWidth - 16, kTop = 58, kBottom = kHeight - 44;
constexpr int kTicks = 6;

using Points = std::vector<std::pair<double, double>>;

// 1, 2 or 5 times a power of ten: the smallest such distance that needs at most kTicks ticks.
double TickDistance(double range) {
  const double rough = range / kTicks, power = std::pow(10, std::floor(std::log10(rough)));
  for (const double factor : {1.0, 2.0, 5.0})
    if (factor * power >= rough) return factor * power;
  return 10 * power;
}

// From numbers to the picture's coordinates.
struct Frame {
  double x_min = 0, x_max = 1, y_min = 0, y_max = 1;

  explicit Frame(const Points& points) {
    if (points.empty()) return;
    x_min = x_max = points.front().first, y_min = y_max = points.front().second;
    for (const auto& [x, y] : points) {
      x_min = std::min(x_min, x), x_max = std::max(x_max, x);
      y_min = std::min(y_min, y), y_max = std::max(y_max, y);
    }
    if (x_max == x_min) ++x_max;
    const double margin = y_max == y_min ? 0.5 : 0.05 * (y_max - y_min);
    y_min -= margin, y_max += margin;
  }
  double X(double x) const { return kLeft + (x - x_min) / (x_max - x_min) * (kRight - kLeft); }
  double Y(double y) const { return kBottom - (y - y_min) / (y_max - y_min) * (kBottom - kTop); }
};

void Add(Points& points, int64_t step, double loss) {
  if (std::isfinite(loss)) points.emplace_back(static_cast<double>(step), loss);
}

// Exponential moving average over about a twentieth of the steps.
Points Smooth(Points points) {
  const double keep = 1 - 1 / std::max(1.0, static_cast<double>(points.size()) / 20);
  for (size_t i = 1; i < points.size(); ++i)
    points[i].second = keep * points[i - 1].second + (1 - keep) * points[i].second;
  return points;
}

std::string Text(double x, double y, std::string_view style, const std::string& text) {
  return absl::StrFormat("<text x=\"%.1f\" y=\"%.1f\" %s>%s</text>\n", x, y, std::string(style),
                         text);
}

std::string Axes(const Frame& f) {
  const double dx = TickDistance(f.x_max - f.x_min), dy = TickDistance(f.y_max - f.y_min);
  std::string svg;
  for (double y = std::ceil(f.y_min / dy) * dy; y <= f.y_max; y += dy) {
    absl::StrAppendFormat(&svg, "<path d=\"M%.1f %.1fH%.1f\" stroke=\"#e4e4e4\"/>", kLeft, f.Y(y),
                          kRight);
    svg += Text(kLeft - 8, f.Y(y) + 4, "text-anchor=\"end\"", absl::StrFormat("%.4g", y));
  }
  for (double x = std::ceil(f.x_min / dx) * dx; x <= f.x_max; x += dx)
    svg += Text(f.X(x), kBottom + 18, "text-anchor=\"middle\"", absl::StrFormat("%.6g", x));
  absl::StrAppendFormat(&svg, "<path d=\"M%.1f %.1fV%.1fH%.1f\" fill=\"none\" stroke=\"#444\"/>\n",
                        kLeft, kTop, kBottom, kRight);
  return svg + Text((kLeft + kRight) / 2, kHeight - 8, "text-anchor=\"middle\"", "step");
}

// Printable ASCII as XML; a path may have any bytes.
std::string XmlText(const std::string& text) {
  return absl::StrReplaceAll(Printable(text),
                             {{"&", "&amp;"}, {"<", "&lt;"}, {">", "&gt;"}, {"\n", " "}});
}

std::string LastOf(const char* what, std::string_view style, const Points& points) {
  const std::string last =
      points.empty()
          ? ""
          : absl::StrFormat(" %.4f after step %.0f", points.back().second, points.back().first);
  return absl::StrCat("<tspan ", std::string(style), ">", what, last, "</tspan>");
}

std::string Line(const Frame& frame, const Points& points, std::string_view style) {
  std::string svg = absl::StrCat("<polyline fill=\"none\" stroke-linejoin=\"round\" ",
                                 std::string(style), " points=\"");
  for (const auto& [x, y] : points)
    absl::StrAppendFormat(&svg, "%.1f,%.1f ", frame.X(x), frame.Y(y));
  return points.empty() ? "" : svg + "\"/>\n";
}

}  // namespace

std::string CurveSvg(const History& history, const CurveTitle& title) {
  Points losses, held_out;
  for (const StepRecord& record : history.steps)
    Add(losses, record.report.step, record.report.loss);
  for (const Evaluated& e : history.held_out) Add(held_out, e.step, e.loss);
  Points all = losses;
  all.insert(all.end(), held_out.begin(), held_out.end());
  const Frame frame(all);
  std::string svg = absl::StrFormat(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%1$.0f\" height=\"%2$.0f\" "
      "viewBox=\"0 0 %1$.0f %2$.0f\" font-family=\"sans-serif\" font-size=\"12\" fill=\"#444\">\n"
      "<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n",
      kWidth, kHeight);
  absl::StrAppend(&svg, Text(kLeft, 16, "font-weight=\"bold\"", XmlText(title.model)),
                  Text(kLeft, 32, "", XmlText(title.data)),
                  Text(kLeft, 48, "",
                       LastOf("loss", "fill=\"#1f5fa8\"", losses) +
                           LastOf("held-out loss", "dx=\"12\" fill=\"#c0392b\"", held_out)),
                  Axes(frame), Line(frame, losses, "stroke=\"#a9c8e8\""),
                  Line(frame, Smooth(losses), "stroke=\"#1f5fa8\" stroke-width=\"2\""));
  for (const auto& [x, y] : held_out)
    absl::StrAppendFormat(&svg, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"3.5\" fill=\"#c0392b\"/>\n",
                          frame.X(x), frame.Y(y));
  return svg + "</svg>\n";
}

}  // namespace ebb::gpt
