"""Technical documentation of a run along Articles 10, 13 and 15 and Annex IV of Regulation (EU) 2024/1689.

Every statement is a sentence whose figures are looked up in the record, and names each file and field that it took one
from. A statement whose record is missing is left out. What no record can say is a blank for the operator.

Assumes nothing about whether the Regulation applies; it is no conformity assessment.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from raycloak.coordinator.record.run_reader import RunData
from raycloak.coordinator.report.members import Evidence
from raycloak.coordinator.report.record_index import RecordField, RecordIndex

MANIFEST: Final = "manifest.json:computation"
MECHANISM: Final = f"{MANIFEST}.mechanism"
CONFIG: Final = "config.yaml:"
VERDICT: Final = "verdict.json:"


@dataclass(frozen=True, slots=True)
class Statement:
    """A sentence from the record, and where each of its figures stands."""

    text: str
    sources: tuple[RecordField, ...]


@dataclass(frozen=True, slots=True)
class Duty:
    """One requirement: its place in the Regulation, what it asks for, what the record says, what the operator adds."""

    place: str
    asks: str
    statements: tuple[Statement, ...]
    blank: str


@dataclass(frozen=True, slots=True)
class Chapter:
    """An article or a point of the annex."""

    title: str
    duties: tuple[Duty, ...]


@dataclass(frozen=True, slots=True)
class Documentation:
    """All chapters, and every record that a statement names, in the order of its number."""

    chapters: tuple[Chapter, ...]
    sources: tuple[RecordField, ...]


def documentation_of(run: RunData, evidence: Evidence) -> Documentation:
    """Return the documentation of a run."""
    index = RecordIndex(run, evidence)
    chapters = tuple(
        Chapter(title, tuple(Duty(each.place, each.asks, _stated(index, each), each.blank) for each in asked))
        for title, asked in (_ARTICLE_10, _ARTICLE_13, _ARTICLE_15, _ANNEX_IV)
    )
    return Documentation(chapters, index.cited)


class Said:
    """A sentence with the value of each record in its braces; it is left out if one is missing or empty.

    Args:
        where: a record and the value that it must have for the sentence to be true.
        unless: a record that must have no such field.
    """

    def __init__(
        self, sentence: str, *records: str, where: tuple[str, object] | None = None, unless: str | None = None
    ) -> None:
        self._sentence = sentence
        self._records = records
        self._where = where
        self._unless = unless

    def stated(self, index: RecordIndex) -> Statement | None:
        """Return the sentence for a run."""
        if self._unless is not None and index.has(self._unless):
            return None
        if self._where is not None and (not index.has(self._where[0]) or index.value(self._where[0]) != self._where[1]):
            return None
        if not all(index.states(each) for each in self._records):
            return None
        return _statement(index, self._sentence, self._records)


@dataclass(frozen=True, slots=True)
class Chosen:
    """The sentence that belongs to the value of a record, or ``otherwise``; an empty one is left out."""

    record: str
    sentences: Mapping[Any, str]
    otherwise: str = ""

    def stated(self, index: RecordIndex) -> Statement | None:
        """Return the sentence for a run; None if its record has no such field."""
        if not index.has(self.record):
            return None
        sentence = self.sentences.get(index.value(self.record), self.otherwise)
        return _statement(index, sentence, (self.record,)) if sentence else None


@dataclass(frozen=True, slots=True)
class Requirement:
    """A requirement before it is answered: ``blank`` is what the operator adds to what the record ``says``."""

    place: str
    asks: str
    blank: str
    says: tuple[Said | Chosen, ...] = ()


def _stated(index: RecordIndex, asked: Requirement) -> tuple[Statement, ...]:
    return tuple(said for each in asked.says if (said := each.stated(index)) is not None)


def _statement(index: RecordIndex, sentence: str, records: tuple[str, ...]) -> Statement:
    sources = tuple(index.cite(each) for each in records)
    return Statement(sentence.format(*(each.shown for each in sources)), sources)


_RESOURCES: Final = (
    Said("{} workers hosted {} virtual workers.", f"{VERDICT}num_workers", f"{VERDICT}virtual_workers"),
    Said("The last execution took {} seconds.", f"{VERDICT}wall_seconds"),
)

_PRIVATE: Final = (f"{MECHANISM}.private", True)

# Only the mechanism of data that a client sends has this field.
_SENT: Final = f"{MECHANISM}.max_participations"

_PRIVACY: Final = (
    Chosen(f"{VERDICT}private", {False: "NOT PRIVATE: the model may reveal any example it was trained on."}),
    Said(
        "Against outsiders and the aggregator the run claims ε = {} at δ = {}, however it ended.",
        f"{VERDICT}privacy_epsilon",
        f"{VERDICT}privacy_delta",
    ),
    Said("All runs of its account {} together claim ε = {}.", f"{VERDICT}account", f"{VERDICT}epsilon_cap"),
    Chosen(
        f"{VERDICT}privacy_epsilon_one_worker",
        {None: ""},
        "If one worker's machine helps the aggregator, the claim is ε = {}.",
    ),
)

_QUALITY: Final = (
    Said(
        "On the evaluation split the accuracy is {} after {} steps.", f"{VERDICT}evaluation_accuracy", f"{VERDICT}steps"
    ),
    Said("Its macro F1 there is {}.", f"{VERDICT}evaluation_f1"),
    Said("On the evaluation split the mean loss is {} after {} steps.", f"{VERDICT}evaluation_loss", f"{VERDICT}steps"),
)

_ARTICLE_10: Final = (
    "Article 10 – Data and data governance",
    (
        Requirement(
            "10(2)(a)",
            "Relevant design choices",
            "Why this model, this loss and these data serve the intended purpose.",
            says=(
                Said(
                    "The model {}, trained by {}, was fixed in the manifest before the first step.",
                    f"{MANIFEST}.model",
                    f"{MANIFEST}.optimizer.name",
                ),
                Said("Its loss is {}.", f"{MANIFEST}.loss.name"),
            ),
        ),
        Requirement(
            "10(2)(b)",
            "Data collection processes, the origin of data, and for personal data the original purpose of collection",
            "Who collected the data, when, from whom, on which legal basis, and for which purpose.",
            says=(
                Said("The training data are of kind {}.", f"{CONFIG}dataset.kind"),
                Said("They are declared public: {}.", f"{CONFIG}dataset.public"),
                Said("They are identified by the digest {}.", f"{MANIFEST}.dataset"),
            ),
        ),
        Requirement(
            "10(2)(c)",
            "Data preparation: annotation, labelling, cleaning, updating, enrichment and aggregation",
            "How labels were made and by whom, what was cleaned, and what was left out before the run.",
            says=(
                Chosen(f"{CONFIG}dataset.scale", {1.0: ""}, "Every feature is divided by the public constant {}."),
                Said(
                    "The tokenizer or pipeline that prepared the examples has the digest {}.", f"{MANIFEST}.tokenizer"
                ),
            ),
        ),
        Requirement(
            "10(2)(d)", "Formulation of assumptions", "What the data are supposed to measure and to represent."
        ),
        Requirement(
            "10(2)(e)",
            "Availability, quantity and suitability of the data",
            "Why this quantity is enough for the intended purpose.",
            says=(
                Said(
                    "There are {} training examples, of which each step draws {} on average.",
                    f"{MECHANISM}.num_examples",
                    f"{MECHANISM}.expected_batch_size",
                    unless=_SENT,
                ),
                Said(
                    "Over {} steps each example is drawn with probability {} in each.",
                    f"{MECHANISM}.steps",
                    f"{MECHANISM}.sample_rate",
                    unless=_SENT,
                ),
                Said(
                    "A client sends up to {} training examples for each of {} steps; one takes part in {} at most, by "
                    "the word of the service that counts them.",
                    f"{MECHANISM}.num_examples",
                    f"{MECHANISM}.steps",
                    _SENT,
                ),
                Chosen(
                    f"{VERDICT}data_check",
                    {None: "No check of these data for missing values, wrong labels or duplicates is on record."},
                    "The owner's check for missing values, wrong labels and duplicates passed; its digest is {}.",
                ),
            ),
        ),
        Requirement(
            "10(2)(f), (g)",
            "Examination for biases, and measures to detect, prevent and mitigate them",
            "Which groups were examined, what was found, and what was done about it.",
            says=(
                Said(
                    "The noised counts of examples by class are {} with noise of standard deviation {} in each.",
                    "measurements.json:class_counts.values",
                    "measurements.json:class_counts.deviation.count_0",
                ),
            ),
        ),
        Requirement("10(2)(h)", "Data gaps and shortcomings", "Which gaps are known and how they are dealt with."),
        Requirement(
            "10(3), (4)",
            "Relevant and sufficiently representative data, as far as possible free of errors and complete",
            "Geographical, contextual and behavioural setting; why the data represent the persons concerned.",
            says=(
                Said("The evaluation split is of kind {}, and is not trained on.", f"{CONFIG}evaluation.dataset.kind"),
            ),
        ),
        Requirement(
            "10(5)",
            "Safeguards where special categories of personal data are processed to detect bias",
            "Whether special categories are processed at all, and why no other data would do.",
            says=(
                Said(
                    "Training kept differential privacy of one example: clipping norm {}, noise multiplier {}.",
                    f"{MECHANISM}.max_grad_norm",
                    f"{MECHANISM}.noise_multiplier",
                    where=_PRIVATE,
                ),
                Chosen(f"{VERDICT}private", {False: "NOT PRIVATE: differential privacy was off."}),
                Said("The examples were sealed for attested workers: {}.", f"{VERDICT}data_sealed"),
            ),
        ),
    ),
)

_ARTICLE_13: Final = (
    "Article 13 – Transparency and information to deployers",
    (
        Requirement(
            "13(3)(a)", "Identity and contact details of the provider", "Name, address and contact of the provider."
        ),
        Requirement(
            "13(3)(b)(i)", "Intended purpose", "What the system is for, for whom, and what it must not be used for."
        ),
        Requirement(
            "13(3)(b)(ii)",
            "Level of accuracy, robustness and cybersecurity, and circumstances that may affect it",
            "The level that was validated for the intended purpose, and known circumstances that lower it.",
            says=(*_QUALITY,),
        ),
        Requirement(
            "13(3)(b)(iii)",
            "Circumstances that may lead to risks to health, safety or fundamental rights",
            "Foreseeable misuse and its risks. The limits in this report name the risks of the training.",
            says=(*_PRIVACY,),
        ),
        Requirement(
            "13(3)(b)(iv), (vii)",
            "Explaining and interpreting the output",
            "What explains an output, and how a deployer should read it.",
        ),
        Requirement(
            "13(3)(b)(v)",
            "Performance for specific persons or groups",
            "Results by group. The run measured the whole split only.",
        ),
        Requirement(
            "13(3)(b)(vi)",
            "Specifications of input data",
            "Which input is valid, and what happens with other input.",
            says=(
                Said(
                    "The loss of the model is {}, over data of kind {}.",
                    f"{MANIFEST}.loss.name",
                    f"{CONFIG}dataset.kind",
                ),
                Said("It has {} trained parameters.", f"{MECHANISM}.dimension"),
            ),
        ),
        Requirement(
            "13(3)(c)",
            "Changes determined in advance",
            "Planned changes after the first conformity assessment, or none.",
            says=(
                Said(
                    "The model was fixed after step {} with the model digest {}.",
                    f"{VERDICT}steps",
                    f"{VERDICT}model_digest",
                ),
            ),
        ),
        Requirement("13(3)(d)", "Human oversight (Article 14)", "Who oversees the system, with which means."),
        Requirement(
            "13(3)(e)",
            "Computational resources, expected lifetime, maintenance",
            "Resources in use, expected lifetime, maintenance and its frequency.",
            says=(*_RESOURCES,),
        ),
        Requirement(
            "13(3)(f)",
            "Logs (Article 12)",
            "How deployers collect, store and read the logs of the system in use.",
            says=(
                Said(
                    "The training kept {} events, and an evidence log of {} signed entries.",
                    "metrics.jsonl:events",
                    "evidence.jsonl:entries",
                ),
            ),
        ),
    ),
)

_ARTICLE_15: Final = (
    "Article 15 – Accuracy, robustness and cybersecurity",
    (
        Requirement(
            "15(1), (3)",
            "Accuracy, and its metrics",
            "Why this metric and this level are appropriate, and over which lifetime.",
            says=(
                *_QUALITY,
                Said(
                    "On the private examples the accuracy was {}, noised with standard deviation {}, after step {}.",
                    "measurements.json:evaluation.values.accuracy",
                    "measurements.json:evaluation.deviation.accuracy",
                    "measurements.json:evaluation.after",
                ),
                Said(
                    "On the private examples the loss was {}, noised with standard deviation {}, after step {}.",
                    "measurements.json:evaluation.values.loss",
                    "measurements.json:evaluation.deviation.loss",
                    "measurements.json:evaluation.after",
                ),
            ),
        ),
        Requirement(
            "15(4)",
            "Resilience against errors, faults and inconsistencies; feedback loops",
            "Resilience of the system in use, its fallbacks, and whether it goes on learning from its own output.",
            says=(
                Said(
                    "{} members left, {} joined later, and ledger or orchestrator were restarted {} times.",
                    "metrics.jsonl:departure",
                    "metrics.jsonl:join",
                    "metrics.jsonl:restart",
                ),
                Said(
                    "{} steps took more than one attempt; a repeated step gives the same bytes and is charged once.",
                    "metrics.jsonl:repeated",
                ),
                Said("The run was resumed {} times.", "metrics.jsonl:resumed"),
                Said(
                    "Every operation of the training has a deterministic kernel: {}.",
                    f"{MANIFEST}.numerics.deterministic",
                ),
            ),
        ),
        Requirement(
            "15(5)",
            "Cybersecurity: data poisoning, model poisoning, evasion, attacks on confidentiality, model flaws",
            "Measures against poisoned data, which no record of a training shows; against evasion; incidents.",
            says=(
                *_PRIVACY,
                Chosen(
                    f"{VERDICT}masked_bytes",
                    {0: "Nothing was masked: the aggregator saw the update of each worker."},
                    "{} bytes of updates reached the aggregators, all masked.",
                ),
                Chosen(
                    f"{VERDICT}evidence_class",
                    {"simulated": "SIMULATED evidence: no hardware vouches for the machines."},
                    "Members were admitted on evidence of the class {}.",
                ),
                Said(
                    "{} members were admitted, and {} admissions or keys were refused.",
                    "evidence.jsonl:members",
                    "evidence.jsonl:refusals",
                ),
                Said("A witness on other storage holds the head of the ledger: {}.", f"{VERDICT}rollback_witness"),
                Said(
                    "The initial parameters have the digest {}, every other tensor of the model {}, its code {}.",
                    f"{MANIFEST}.initial_parameters",
                    f"{MANIFEST}.frozen",
                    f"{MANIFEST}.model_code",
                ),
            ),
        ),
    ),
)

_ANNEX_IV: Final = (
    "Annex IV – Technical documentation",
    (
        Requirement(
            "Annex IV, 1",
            "General description of the system",
            "Intended purpose, provider, version; what it interacts with; forms on the market; instructions for use.",
            says=(
                Said("The training run is named {} and has the id {}.", "run.json:name", "run.json:run_id"),
                Said(
                    "It ran on Python {}, torch {} and NumPy {}.",
                    f"{MANIFEST}.numerics.python",
                    f"{MANIFEST}.numerics.torch",
                    f"{MANIFEST}.numerics.numpy",
                ),
                Said("It was computed on {}.", f"{MANIFEST}.numerics.device"),
            ),
        ),
        Requirement(
            "Annex IV, 2(a)–(c)",
            "Development: methods, design choices, architecture, resources",
            "Pre-trained systems and tools of third parties; key design choices and trade-offs; how components fit.",
            says=(
                Said(
                    "The gradient of each example was clipped to norm {}, over {} examples a step on average.",
                    f"{MECHANISM}.max_grad_norm",
                    f"{MECHANISM}.expected_batch_size",
                    where=_PRIVATE,
                ),
                Said(
                    "The update rule is {} with learning rate {} and schedule {}.",
                    f"{MANIFEST}.optimizer.name",
                    f"{MANIFEST}.optimizer.learning_rate",
                    f"{MANIFEST}.optimizer.schedule",
                ),
            ),
        ),
        Requirement(
            "Annex IV, 2(c)",
            "Computational resources for development, training, testing and validation",
            "Resources outside this run.",
            says=(*_RESOURCES,),
        ),
        Requirement(
            "Annex IV, 2(d)",
            "Data requirements and datasheets",
            "Datasheets: provenance, scope, main characteristics, selection, labelling, cleaning.",
            says=(
                Said(
                    "The data of {} examples are described under Article 10.",
                    f"{MECHANISM}.num_examples",
                    unless=_SENT,
                ),
            ),
        ),
        Requirement(
            "Annex IV, 2(e), (f)",
            "Human oversight; changes determined in advance",
            "Assessment of the oversight that Article 14 needs; changes determined in advance.",
        ),
        Requirement(
            "Annex IV, 2(g)",
            "Validation and testing: data, metrics, results, signed reports",
            "Test reports, dated and signed by the persons responsible; potentially discriminatory impacts.",
            says=(
                *_QUALITY,
                Said("Every step is committed in a log of {} signed entries.", "evidence.jsonl:entries"),
            ),
        ),
        Requirement(
            "Annex IV, 2(h)",
            "Cybersecurity measures",
            "Measures of the system in use; the measures of the training are under Article 15(5).",
        ),
        Requirement(
            "Annex IV, 3",
            "Monitoring, functioning and control",
            "Capabilities and limits, accuracy for specific persons or groups, unintended outcomes, input data.",
        ),
        Requirement(
            "Annex IV, 4",
            "Appropriateness of the performance metrics",
            "Why these metrics are appropriate for this system.",
            says=(Said("The metrics of the training are in the verdict, which ended as {}.", f"{VERDICT}ending"),),
        ),
        Requirement("Annex IV, 5", "Risk management system (Article 9)", "Description of the risk management system."),
        Requirement(
            "Annex IV, 6",
            "Changes through the lifecycle",
            "Relevant changes by the provider.",
            says=(Said("The manifest that fixes the run has the digest {}.", "manifest.json:digest"),),
        ),
        Requirement(
            "Annex IV, 7",
            "Harmonised standards and other specifications",
            "List of standards, or of the solutions adopted in their place.",
        ),
        Requirement("Annex IV, 8", "EU declaration of conformity (Article 47)", "A copy of the declaration."),
        Requirement(
            "Annex IV, 9", "Post-market monitoring (Article 72)", "The system of post-market monitoring and its plan."
        ),
    ),
)
