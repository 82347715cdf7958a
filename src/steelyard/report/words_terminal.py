"""Words that only a terminal shows."""

TABLE: dict[str, tuple[str, str]] = {
    "terminal.left_out": ("Not shown: {0}. --wide shows all columns.", "未显示：{0}。--wide 显示全部列。"),
    "terminal.unchecked": ("* quality is reported, not checked", "* 质量仅报告，未检查"),
    "terminal.no_mfu": ("No MFU: {0}.", "无 MFU：{0}。"),
    "terminal.plan": ("plan", "并行"),
    "terminal.rate": ("rate", "吞吐量"),
    "terminal.scope": ("scope", "范围"),
    "terminal.run": ("run", "运行"),
    "terminal.machine": ("machine", "机器"),
    "terminal.device": ("device", "设备"),
    "terminal.quality": ("quality", "质量"),
    "terminal.runs.one": ("1 run", "1 次运行"),
    "terminal.runs": ("{0} runs", "{0} 次运行"),
    "terminal.more": (
        "More: --full prints every detail, --explain where the time goes, --format html --to page.html writes a page.",
        "更多：--full 显示全部细节，--explain 显示时间去向，--format html --to page.html 生成网页。",
    ),
    "terminal.interval": (
        "rate: all devices together. ±: half of its 95 % interval. /: unknown, --full says why.",
        "吞吐量为全部设备之和；± 为其 95 % 区间的一半；/ 表示未知，原因见 --full。",
    ),
}
