"""What a model says in the benchmark of the way out: prose in English and Chinese as ids and as token texts.

The prose is written for this: what an assistant answers about everyday things, with digits, names and some
lists. A stream of any length takes its sentences in a seeded order, again and again, so its words and their
neighbours are those of real text, which decides what a filter holds. Not here: rules (`outbound_rules.py`).
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pipeline.detokenizer import Detokenizer, open_detokenizer
from pipeline.model_text import ModelText

NUM_TOKENS_PER_HIT: Final = 50

ENGLISH: Final = """\
A lithium battery ages fastest when it is kept full in a warm place, so unplug the laptop once it is charged.
The recipe serves four people and takes about forty minutes, most of which the oven does without you.
First, write down what you already know; second, mark every step that you could not explain to a friend.
In the spring of 1848 the news travelled by steamer and by letter, and reached the valley two weeks late.
You can think of an index as the last pages of a book: it costs some paper, but it saves you the search.
The northern line was closed for repairs, which is why the buses were so crowded that morning.
If the rash spreads or you get a fever, please see a doctor instead of waiting for it to go away.
Her second novel is quieter than the first, and the dialogue carries more of the story.
Prices rose by 3.2% over the year, while wages in the same period grew by only 1.8%.
Before you sign the lease, ask who pays for the heating, how the deposit is kept, and when it comes back.
The function returns early when the list is empty, so the division below can never fail.
Most cacti need less water in winter; once a month is plenty as long as the soil drains well.
He practised the difficult passage slowly, hands apart, until it no longer felt like two pieces of music.
There are three reasons for the delay, and only one of them has anything to do with the weather.
A good photograph of a building often begins with a long walk around it and very little light.
The museum opens at 10:00 and is free on the first Sunday of every month.
Bees find their way home by the sun, by landmarks, and, on cloudy days, by the polarised light of the sky.
Compound interest works quietly: 5,000 at four percent becomes roughly 7,400 after ten years.
Let the dough rest overnight in the fridge, because cold fermentation gives the crust more flavour.
The committee met twice, argued about the budget, and finally agreed on a smaller version of the plan.
Rivers that carry a lot of sand change their beds often, and old maps of the delta show it clearly.
To restore the backup, stop the service, copy the files to the new disk, and check their owner.
She learned the language by listening to the radio in the kitchen and repeating whatever she understood.
Sleep is easier when the room is cool, the screen is off, and the coffee was hours ago.
The treaty did not end the quarrel, but it moved the quarrel from the border to the conference table.
Your résumé is clear; I would only move the projects above the education and shorten the last paragraph.
An eclipse of the moon can be watched without any glasses, and it lasts for more than an hour.
Small firms pay more for energy than large ones, since they cannot sign contracts for several years.
When two sensors disagree, the controller keeps the last safe value and rings a bell in the office.
The children counted 27 kinds of birds in the park, although some of them may have been counted twice.
Olive oil smokes at about 190 degrees, so it is fine for frying vegetables but not for a very hot pan.
What the letter leaves out is as interesting as what it says: there is not a word about the money.
Run the tests on the old version first; otherwise you cannot tell which failures are new.
The bridge was built for carts and now carries forty thousand cars a day, which explains the cracks.
Try the simple explanation before the clever one, and keep a note of what would prove it wrong.
"""

CHINESE: Final = """\
锂电池长期充满并放在高温的地方会老化得更快，所以充好电以后最好拔掉电源。
这道菜大约需要四十分钟，先把牛肉切成薄片，用酱油和淀粉腌一会儿，再放进热锅里快炒。
学习一门外语没有捷径，但是每天坚持听半个小时广播，三个月以后你会明显感到进步。
首先，把已经知道的条件写下来；其次，找出哪一步无法向别人解释清楚。
今年上半年物价上涨了3.2%，而同一时期的平均工资只增长了1.8%。
那座老桥原来只走马车，现在每天要通过四万辆汽车，难怪桥面出现了裂缝。
如果发烧超过三天或者呼吸困难，请尽快去医院，不要自己在家里等。
数据库的索引就像书后面的目录，多占一点空间，却能省去大量查找的时间。
她的第二部小说比第一部安静得多，人物之间的对话推动着整个故事。
签订租房合同之前，要问清楚暖气费由谁承担，押金什么时候退还。
春天的时候，江南的雨总是下得很细，石板路上长满了青苔。
当列表为空的时候，函数会提前返回，因此后面的除法不会出错。
博物馆每天上午10点开门，每个月的第一个星期日免费参观。
仙人掌在冬天不需要太多的水，一个月浇一次就够了，关键是土壤要透气。
他把最难的那一段放慢速度，左右手分开练习，直到听起来像一首完整的曲子。
这次延误有三个原因，其中只有一个和天气有关系。
蜜蜂依靠太阳、地标和天空中的偏振光找到回家的路。
复利的力量在于时间：五千元按照百分之四的年利率，十年以后大约是七千四百元。
面团放进冰箱里冷藏一夜，低温发酵会让面包皮的味道更加丰富。
委员会开了两次会，围绕预算争论了很久，最后同意采用规模较小的方案。
含沙量大的河流经常改道，从旧地图上可以清楚地看到三角洲的变化。
恢复备份的步骤如下：停止服务，把文件复制到新的硬盘，然后检查文件的权限。
想要睡得好，房间要凉一些，睡前少看手机，下午以后不要再喝咖啡。
那份条约并没有结束争端，只是把争端从边境搬到了谈判桌上。
你的简历写得很清楚，我建议把项目经验放在教育背景前面，最后一段再短一点。
观看月食不需要任何特殊的眼镜，整个过程会持续一个多小时。
小企业用电的价格比大企业高，因为它们没有办法签订长期的供电合同。
两个传感器的读数不一致时，控制器保留最后一个安全的数值，同时通知值班人员。
孩子们在公园里数到了27种鸟，不过有几种可能数了两遍。
橄榄油的烟点大约是一百九十度，适合炒蔬菜，不适合高温煎炸。
这封信没有提到的内容和它写出来的一样有意思：关于那笔钱，里面一个字也没有。
请先在旧版本上运行测试，否则无法判断哪些错误是新出现的。
拍摄建筑往往从绕着它走一圈开始，清晨的光线最柔和。
北方的冬天干燥寒冷，室内开着暖气，最好准备一台加湿器。
先试试简单的解释，再考虑复杂的，并且记下什么样的证据能够推翻它。
"""

PROSE: Final[Mapping[str, str]] = {"en": ENGLISH, "zh": CHINESE}
_SPACE: Final = {"en": " ", "zh": ""}
_STOP: Final = {"en": ". ", "zh": "。"}
_MAX_CHARACTERS: Final = {"en": 6, "zh": 3}  # of a token, on average


@dataclass(frozen=True, slots=True)
class Spoken:
    """One answer, token by token. `chunks`: what the engine brings, an id at a time.

    `texts`: what the detokenizer makes of each, empty in mid-character.
    """

    language: str
    chunks: Sequence[list[int]]
    texts: Sequence[str]

    @classmethod
    def of(cls, model: ModelText, text: str, language: str, num_tokens: int) -> Spoken:
        """The first tokens of a text."""
        ids = model.tokenizer.encode(text, add_special_tokens=False).ids[:num_tokens]
        if len(ids) < num_tokens:
            raise ValueError(f"a text of {len(ids)} tokens cannot give {num_tokens}")
        detokenizer = model_detokenizer(model)
        return cls(language, [[token_id] for token_id in ids], [detokenizer.feed([i]) for i in ids])

    def __len__(self) -> int:
        return len(self.chunks)

    def first(self, num_tokens: int) -> Spoken:
        return Spoken(self.language, self.chunks[:num_tokens], self.texts[:num_tokens])

    @property
    def pieces(self) -> list[str]:
        """What stages after the detokenizer get: no empty texts."""
        return [text for text in self.texts if text]

    @property
    def text(self) -> str:
        return "".join(self.texts)


def model_detokenizer(model: ModelText) -> Detokenizer:
    """For an answer to a prompt that it does not depend on."""
    return open_detokenizer(model.vocabulary)


def prose(language: str, num_characters: int, rng: random.Random) -> str:
    """At least so many characters."""
    sentences = PROSE[language].splitlines()
    parts: list[str] = []
    size = 0
    while size < num_characters:
        rng.shuffle(sentences)
        parts += sentences
        size += len(PROSE[language])
    return _SPACE[language].join(parts)


def say(model: ModelText, language: str, num_tokens: int, seed: int = 3) -> Spoken:
    """So many tokens of prose."""
    text = prose(language, num_tokens * _MAX_CHARACTERS[language], random.Random(seed))
    return Spoken.of(model, text, language, num_tokens)


def say_denied(
    model: ModelText, language: str, num_tokens: int, denied: Sequence[str], seed: int = 3
) -> Spoken:
    """The same with something of `denied` about every 50 tokens: in English as words of their own."""
    rng = random.Random(seed)
    text = prose(language, num_tokens * _MAX_CHARACTERS[language], rng)
    plain = Spoken.of(model, text, language, num_tokens)
    every = NUM_TOKENS_PER_HIT * len(plain.text) // num_tokens
    space = _SPACE[language]
    parts = []
    at = 0
    while at < len(text):
        end = at + rng.randint(every - 10, every + 10)
        end = max(text.find(space, end), end) + len(space)
        parts.append(text[at:end] + rng.choice(denied) + space)
        at = end
    return Spoken.of(model, "".join(parts), language, num_tokens)


def say_json(model: ModelText, language: str, num_tokens: int, seed: int = 3) -> Spoken:
    """The beginning of one JSON document with the prose in it."""
    rng = random.Random(seed)
    sentences = prose(language, num_tokens * _MAX_CHARACTERS[language], rng).split(_STOP[language])
    entries = [
        {"id": number, "title": sentence[:20], "text": sentence, "done": number % 2 == 0, "score": 0.5}
        for number, sentence in enumerate(sentences)
    ]
    text = json.dumps({"entries": entries}, ensure_ascii=False)
    return Spoken.of(model, text, language, num_tokens)
