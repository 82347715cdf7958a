"""Words of the pages that set runs side by side: a comparison, a history."""

TABLE: dict[str, tuple[str, str]] = {
    # comparison
    "compare": ("Comparison", "对比"),
    "compare.base": ("base", "基准"),
    "compare.new": ("new", "新"),
    "compare.side": ("side", "一方"),
    "compare.runs": ("valid runs", "有效运行次数"),
    "compare.rate": ("rate", "吞吐量"),
    "compare.records": ("records", "记录"),
    "compare.left_out": ("Not valid, and in no mean: {0}.", "无效，不计入平均：{0}。"),
    "compare.left_out.one": ("{0} of {1} ({2})", "{1} 的 {0}（{2}）"),
    "compare.shared": ("{0} record(s) stand on both sides.", "有 {0} 条记录同时属于双方。"),
    "compare.interval": ("{0}, 95 % interval {1}", "{0}，95 % 区间 {1}"),
    "compare.interval.steps": (
        "{0}, 95 % interval {1} (from the steps of a run, which do not show the spread between runs)",
        "{0}，95 % 区间 {1}（来自单次运行的各步，不反映各次运行之间的差异）",
    ),
    "compare.faster": ("faster: significant", "更快：显著"),
    "compare.slower": ("slower: significant", "更慢：显著"),
    "compare.below threshold": ("significant, but below the threshold of {0}", "显著，但低于阈值 {0}"),
    "compare.not significant": ("not significant", "不显著"),
    "compare.not tested": (
        "not tested: that takes two valid runs a side, and runs that differ (--repeat)",
        "未检验：每一方需至少两次有效且有差异的运行（--repeat）",
    ),
    "compare.no rate": ("no ratio: {0}", "无法得出比值：{0}"),
    "compare.no_valid_run": ("{0} has no valid run", "{0} 没有有效运行"),
    "compare.no_rate": ("{0} has no rate", "{0} 没有吞吐量"),
    "compare.different_work": ("the rates count different work: {0} and {1}", "吞吐量的计数单位不同：{0} 与 {1}"),
    "compare.untested": ("not tested", "未检验"),
    "compare.across": ("Questions differ in", "题目不同之处"),
    "compare.answers": ("Answers", "答案"),
    "compare.answers.none": ("There are no answers to compare.", "没有可对比的答案。"),
    "compare.metrics": ("Metrics", "指标"),
    "compare.metric": ("metric", "指标"),
    "compare.phases": ("Seconds per step", "每步秒数"),
    "compare.steps": (
        "Steps are of different sizes: {0} tokens in the base, {1} in the new.",
        "每步大小不同：基准为 {0} 个 token，新的为 {1} 个。",
    ),
    "compare.phase": ("phase", "阶段"),
    "compare.change": ("new / base", "新 / 基准"),
    "compare.judged": ("change", "变化"),
    "compare.better": ("better", "变好"),
    "compare.worse": ("worse", "变差"),
    "compare.other": ("changed", "有变化"),
    "compare.significant": ("significant", "显著"),
    "compare.equal": ("{0} other metrics are equal.", "其余 {0} 项指标相同。"),
    "compare.none": ("No metric differs.", "没有指标不同。"),
    "compare.differs": ("What else differs", "其他不同之处"),
    "compare.differs.none": ("Nothing else differs.", "没有其他不同。"),
    "compare.field": ("field", "字段"),
    "compare.note": (
        "Rate: work of all devices over wall time, the mean over valid runs; below a number its 95 % interval. The ratio is "
        "that of the geometric means, tested with Welch's t on logarithms. Every line of a table is tested by itself: of "
        "twenty that did not change, one is called significant by chance. Phases: of the slowest rank, over the span of the "
        "rate; other is time in no phase.",
        "吞吐量：全部设备的工作量除以总时间，取有效运行的平均；数字下方为其 95 % 区间。比值为几何平均之比，以对数值的 "
        "Welch t 检验判断。表中每行单独检验：二十项未变的指标中，约有一项会偶然被判为显著。阶段：最慢进程，"
        "时间范围与吞吐量相同；other 为不属于任何阶段的时间。",
    ),
    # history
    "history": ("History", "历史"),
    "history.when": ("first run", "首次运行"),
    "history.revision": ("revision", "修订"),
    "history.dirty": ("with local changes", "含本地改动"),
    "history.runs": ("valid runs", "有效运行次数"),
    "history.rate": ("rate", "吞吐量"),
    "history.first": ("of the first", "相对首次"),
    "history.before": ("of the one before", "相对上次"),
    "history.quality": ("quality", "质量"),
    "history.status": ("status", "状态"),
    "history.bad": ("First bad record: {0} ({1}): {2}", "首条异常记录：{0}（{1}）：{2}"),
    "history.good": ("No bad record.", "没有异常记录。"),
    "history.slower": (
        "its rate is {0} of the best before it ({1}), {2}",
        "其吞吐量为此前最佳（{1}）的 {0}，{2}",
    ),
    "history.significant": ("significant", "显著"),
    "history.apart": ("not tested, outside both intervals", "未检验，在双方区间之外"),
    "history.status.bad": ("{0}: {1}", "{0}：{1}"),
    "history.wrong": ("Records that do not verify, and are left out", "未通过验证、未计入的记录"),
    "history.record": ("record", "记录"),
    "history.why": ("why", "原因"),
    "history.none": ("No sound record.", "没有可用的记录。"),
    "history.x": ("point, in order of time", "时间顺序"),
    "history.note": (
        "A row is a run, or consecutive repeats of it: same tune, software, machine, weights and revision. Bad is the first "
        "record that is not valid, or whose rate is below the best before it by more than {0}: for sure where both have two "
        "valid runs or more (Welch's t on logarithms), else with intervals that do not meet. Runs that somebody ended "
        "(interrupted, cancelled, unfinished) are not bad.",
        "每行为一次运行，或其连续的重复运行（设置、软件、机器、权重与修订均相同）。异常：首条无效的记录，或吞吐量比此前最佳低 "
        "{0} 以上的首条记录；双方均有两次以上有效运行时须显著（对数值的 Welch t 检验），否则须区间互不相交。"
        "被人为终止的运行（interrupted、cancelled、unfinished）不算异常。",
    ),
}
