"""Every relation of the made world, by kind of entity."""

from toolformer_dag.embedded.names import Kind
from toolformer_dag.embedded.relation import Relation
from toolformer_dag.embedded.wordings.firm import FIRM
from toolformer_dag.embedded.wordings.person import PERSON
from toolformer_dag.embedded.wordings.river import RIVER
from toolformer_dag.embedded.wordings.town import TOWN

RELATIONS: dict[Kind, tuple[Relation, ...]] = {"person": PERSON, "town": TOWN, "firm": FIRM, "river": RIVER}
